"""Benchmarks: where problems come from, and how they are asked."""
