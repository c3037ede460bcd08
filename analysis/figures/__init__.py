"""From numbers to figures."""
