"""Replay (teacher forcing): feed known completions through every cell to measure fidelity and seconds."""
