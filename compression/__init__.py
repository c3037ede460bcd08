"""Cache policies, which choose the tokens of a KV cache to keep, and the cache that stores these tokens."""
