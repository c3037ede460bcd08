"""Stored results checked again: what hashes and grades say, and drawn completions decoded a second time."""
