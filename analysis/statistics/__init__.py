"""From rows to numbers: metrics, tests, verdicts."""
