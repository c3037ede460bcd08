"""Policies that choose the rows of a key-value cache to keep, and the cache that holds them."""
