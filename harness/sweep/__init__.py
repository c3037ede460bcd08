"""Jobs over cells: the command, the files, the launchers."""
