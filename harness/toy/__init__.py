"""Toy models that are small enough to embed, and the reasoning tasks they were trained on."""
