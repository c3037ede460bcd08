"""How few decoded texts rank the demo's settings as well as replayed ones: the baseline of results/published/replay.

    python scripts/study/few_texts.py

Reads every answer of the demo from its published page, and takes Pass@1 of a few random problems, one draw each, as a
ranking of the 20 settings of a panel: Spearman's correlation with Pass@1 of all 75 problems, with both draws (which
hold the answers of the few) and with the draw that the few are not of. Writes results/published/replay/few_texts.csv
with the mean over 1,000 choices of problems, beside the correlations of the replayed texts' KL.
"""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

PUBLISHED = Path(__file__).resolve().parents[2] / "results/published"
TEXTS, CHOICES = (6, 9, 20, 40, 75), 1000


def main() -> None:
    page = (PUBLISHED / "demo/report.html").read_text()
    found = re.search(r'id="outcome-data">(.*?)</script>', page, re.DOTALL)
    assert found
    outcomes = {cell["id"]: cell["outcomes"] for panel in json.loads(found[1]) for cell in panel["cells"]}
    cells = pd.read_csv(PUBLISHED / "demo/cells.csv").query("policy == 'dynts' and budget == 128")
    replayed = pd.read_csv(PUBLISHED / "replay/cells.csv").query("experiment == 'demo'")
    rows, keys = [], ["model", "benchmark", "keep_ratio", "local_window", "budget"]
    for (model, benchmark), panel in cells.merge(replayed[[*keys, "kl"]], on=keys).groupby(["model", "benchmark"]):
        # Settings x problems x draws.
        right = np.array([[letter == "c" for letter in outcomes[cell]] for cell in panel["cell_id"]])
        right = right.reshape(len(panel), -1, 2)
        rows += [{"model": model, "benchmark": benchmark} | row for row in ranked(right, -panel["kl"].to_numpy())]
    table = pd.DataFrame(rows).round(4)
    table.to_csv(PUBLISHED / "replay/few_texts.csv", index=False)
    print(table.groupby(["way", "texts"])[["both_draws", "other_draw"]].median().round(2).to_string())


def ranked(right: np.ndarray, nearness: np.ndarray) -> list[dict[str, object]]:
    """A row for each number of decoded texts, and one for the replayed texts."""
    rng, both, other = np.random.default_rng(0), right.mean((1, 2)), right[:, :, 1].mean(1)
    rows = []
    for texts in TEXTS:
        some = [right[:, rng.permutation(right.shape[1])[:texts], 0].mean(1) for _ in range(CHOICES)]
        means = [np.mean([correlation(scores, whole) for scores in some]) for whole in (both, other)]
        rows.append({"way": "decoded", "texts": texts, "both_draws": means[0], "other_draw": means[1]})
    own = {"both_draws": correlation(nearness, both), "other_draw": correlation(nearness, other)}
    return [*rows, {"way": "replayed", "texts": 20} | own]


def correlation(scores: np.ndarray, whole: np.ndarray) -> float:
    """Spearman's; 0 if all settings score alike, since this ranks nothing."""
    return 0.0 if np.ptp(scores) == 0 else float(stats.spearmanr(scores, whole).statistic)


if __name__ == "__main__":
    main()
