"""One completion looked into."""
