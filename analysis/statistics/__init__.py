"""Rows to numbers: metrics, tests, verdicts."""
