"""From numbers and figures to one page."""
