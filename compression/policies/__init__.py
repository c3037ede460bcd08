"""The compression policies, one module for each or for a few of a kind."""
