"""Worker processes, and the cores and memory that a process may use."""
