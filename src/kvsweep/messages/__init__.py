"""What a command line needs: errors in one sentence, checks of values from outside, escapes."""
