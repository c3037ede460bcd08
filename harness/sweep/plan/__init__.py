"""From a configuration to jobs and cells."""
