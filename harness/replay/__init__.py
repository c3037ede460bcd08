"""Known texts fed again through every cell: fidelity and seconds, without a token drawn."""
