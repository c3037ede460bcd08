"""Sweeps of KV-cache compression for reasoning language models."""
