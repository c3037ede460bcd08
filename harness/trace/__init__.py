"""Inspect single completions: pictures and numbers of `kvsweep trace`."""
