"""From a model's own correct traces to an importance head for it: traces, labels, train, eval."""
