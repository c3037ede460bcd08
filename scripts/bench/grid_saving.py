"""The tokens that the paper's 20-cell grid saves when it is decoded in one batch, for assumed lengths of the texts.

Lengths are lognormal, cut at 16,384 new tokens; budget 5,000 with the question counted in it (paper's rule), questions
of 150 tokens; all 20 cells (keep_ratio x local_window) first evict at the same step. A compressed text is taken to be
as long as the full cache's. The last line is one JSON object.

    python scripts/bench/grid_saving.py
"""

import json

import numpy as np

from kvsweep.harness.sweep.estimate import saving

LIMIT, BUDGET, QUESTION, CELLS, TEXTS = 16_384, 5_000, 150, 20, 20_000
PANELS = {"AIME-like, mean 10k": (10_000, 0.6), "GPQA-like, mean 7k": (7_000, 0.6), "AMC-like, mean 5k": (5_000, 0.6)}


def main() -> None:
    """Print the saving per panel."""
    random = np.random.default_rng(0)
    result = {}
    for name, (mean, sigma) in PANELS.items():
        drawn = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, TEXTS)
        lengths = np.minimum(drawn, LIMIT).astype(int).tolist()
        reached = float(np.mean(np.array(lengths) > BUDGET - QUESTION))
        result[name] = {"saving": round(saving(lengths, [BUDGET - QUESTION] * CELLS), 2), "evicted": round(reached, 3)}
        print(f"{name}: {result[name]['saving']} times fewer tokens; {reached:.0%} of the texts are ever evicted")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
