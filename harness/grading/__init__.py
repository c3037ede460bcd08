"""Completions to grades."""
