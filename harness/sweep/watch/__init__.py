"""What a sweep says of itself while it runs."""
