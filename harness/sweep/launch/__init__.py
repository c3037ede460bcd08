"""Start jobs: in this process, in several processes, on a cluster."""
