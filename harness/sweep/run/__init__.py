"""Decode, store and grade the cells of a job."""
