"""Toy models that are small enough to embed, and the reasoning tasks that they were trained on."""
