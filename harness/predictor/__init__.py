"""Train an importance predictor from a model's own correct traces: traces, labels, train, eval."""
