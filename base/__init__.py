"""What every package stands on: rows and files, errors, command lines, escaping."""
