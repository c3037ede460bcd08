"""What of each policy's score is its protection: the question, four sinks and the newest tokens, each on and off.

    kvsweep -m model=toy_qwen,toy_llama benchmark=toy_chain,toy_groups benchmark.limit=80 run_name=protection \\
        decoding=r1 decoding.max_new_tokens=448 policy=random policy.rows=136 policy.every=48 \\
     'grid.policy=[full,dynts,snapkv,rkv,gkv,h2o,tova,raas,lazyeviction,inertia,keydiff,knorm,caote,lagkv_16,random]' \\
        'grid.question=[free,pinned]' 'grid.sinks=[0,4]' 'grid.local_window=[1,32]'
    python scripts/study/protection_study.py results/runs/protection --output results/published/protection

With `--kl` the numbers are the mean KL per token of each text that `kvsweep-replay DIR` replayed, in thousandths of a
nat, in place of Pass@1.

All cells of such a run hold the same number of rows. A policy's eight cells are paired by problem and draw. Prints, for
each model, Pass@1 of each policy without protection, the difference that each protection alone and all together make
(interval and p of `paired_tests`, Holm over the policies of a column), and how the variance of the cells' Pass@1
divides into policy, protection and their interaction, with intervals from problems drawn with replacement.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvsweep.analysis.notation import markdown, policy_title
from kvsweep.analysis.statistics.inference import paired_tests
from kvsweep.run_files.row_types import Replay
from kvsweep.run_files.run_reader import read_cells

PARTS = ("question", "sinks", "window")


def named(on: Sequence[bool]) -> str:
    """The name of a set of protections: whether each of `PARTS` is on."""
    return "+".join(part for part, held in zip(PARTS, on, strict=True) if held) or "nothing"


SETS = [named(on) for on in itertools.product((False, True), repeat=len(PARTS))]
ALL = "+".join(PARTS)
RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--output", type=Path, help="folder for scores.csv and variance.csv")
    parser.add_argument("--kl", action="store_true", help="mean KL per token of replayed texts in place of Pass@1")
    args = parser.parse_args()
    measure, scale = ("kl", 1000) if args.kl else ("pass_at_1", 100)
    rows = pd.DataFrame(measured(args.run, kl=args.kl))
    scores, shares = [], []
    for model, group in rows.groupby("model"):
        table = group.pivot(index=["policy", "protected"], columns="pair", values="value").dropna(axis=1)
        policies = sorted(group["policy"].unique())
        cells = (
            table.reindex(pd.MultiIndex.from_product([policies, SETS])).to_numpy().reshape(len(policies), len(SETS), -1)
        )
        benchmarks = np.array([pair.split("/")[0] for pair in table.columns])
        print(f"\n{model}: {len(table.columns)} problems\n")
        print(effects(policies, cells, scale))
        shares.append({"model": model, **variance(cells, benchmarks, scale)})
        scores += [
            {"model": model, "policy": policy, "protected": name, "problems": cells.shape[2], measure: value}
            for policy, line in zip(policies, cells.mean(-1), strict=True)
            for name, value in zip(SETS, line, strict=True)
        ]
    print("\n" + markdown([list(shares[0]), *([str(value) for value in share.values()] for share in shares)]))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(scores).to_csv(args.output / "scores.csv", index=False)
        pd.DataFrame(shares).to_csv(args.output / "variance.csv", index=False)


def measured(run: Path, *, kl: bool) -> Iterator[dict[str, Any]]:
    """Each grade, or each text's KL, of the run's evicting cells, with the model, the policy and what was protected."""
    cells = [(stored, cell) for stored, cell in read_cells(run) if cell["policy"]["name"] != "full"]
    largest = max(cell["policy"]["local_window"] for _, cell in cells)
    for stored, cell in cells:
        policy = cell["policy"]
        on = (policy["question"] == "pinned", bool(policy["sinks"]), policy["local_window"] == largest)
        key = {"model": cell["model"]["title"], "policy": policy["name"], "protected": named(on)}
        for row in stored.rows(Replay) if kl else stored.grades().values():
            pair = f"{cell['benchmark']['name']}/{row.problem_id}/{row.draw}"
            yield {**key, "pair": pair, "value": row.kl_mean if isinstance(row, Replay) else float(bool(row.correct))}


def effects(policies: list[str], cells: NDArray[np.float64], scale: float) -> str:
    """A table: the mean of each policy without protection, and what each protection alone and all together change."""
    columns = []
    for name in (*PARTS, ALL):
        plain, held = (cells[:, SETS.index(one)] for one in ("nothing", name))
        tested = paired_tests((held - plain)[..., None], np.zeros((cells.shape[2], 1)))
        columns.append(
            [
                f"{scale * row.difference:+.1f} ({scale * row.low:.1f} to {scale * row.high:.1f}), p {row.p_holm:.2g}"
                for row in tested.itertuples()
            ]
        )
    means = scale * cells.mean(-1)
    lines = [
        [
            policy_title(policy),
            f"{means[i, 0]:.1f}",
            *(column[i] for column in columns),
            f"{means[i, -1]:.1f}",
        ]
        for i, policy in enumerate(policies)
    ]
    return markdown([["policy", "nothing", *PARTS, "all three", "with all"], *lines])


def variance(cells: NDArray[np.float64], benchmarks: NDArray[np.str_], scale: float) -> dict[str, Any]:
    """Shares of the variance of the cells' means [policies, protections], and the spread between policies, in points.

    Sampling error adds to every share, and most to the interaction's, which has the most cells.
    """
    rng, groups = np.random.default_rng(0), [np.flatnonzero(benchmarks == name) for name in np.unique(benchmarks)]
    drawn = [
        parts(cells[:, :, np.concatenate([rng.choice(group, len(group)) for group in groups])].mean(-1), scale)
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    names = ("policy %", "protection %", "interaction %", "sd of policies, nothing", "sd of policies, all")
    found = parts(cells.mean(-1), scale)
    return {name: f"{x:.1f} ({a:.1f} to {b:.1f})" for name, x, a, b in zip(names, found, low, high, strict=True)}


def parts(means: NDArray[np.float64], scale: float) -> list[float]:
    by_policy, by_protection = means.mean(1, keepdims=True), means.mean(0, keepdims=True)
    rest = means - by_policy - by_protection + means.mean()
    shares = [(by_policy - means.mean()) ** 2, (by_protection - means.mean()) ** 2, rest**2]
    total = ((means - means.mean()) ** 2).mean()
    spread = scale * means.std(axis=0, ddof=1)
    return [*(100 * share.mean() / total for share in shares), spread[0], spread[-1]]


if __name__ == "__main__":
    main()
