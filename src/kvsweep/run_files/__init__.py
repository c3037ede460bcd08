"""What a run's files hold: row types, readers, status, and what a completion's text says."""
