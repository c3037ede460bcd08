"""Requests to completions."""
