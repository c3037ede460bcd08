"""Decoding: from requests to completions."""
