"""How near each policy stays to the full cache on real reasoning traces, at three sizes.

`python scripts/study/r1_study.py replay --texts FILE --out DIR` feeds the first tokens of the traces of a file (lines
with id, problem and text) through SmolLM2-135M, a few texts at every size a turn; it goes on where it stopped.
`tables --texts FILE --out DIR` writes table and figure to results/published/replay.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from replay_study import replay_timed

from kvsweep.analysis.figures import style
from kvsweep.analysis.notation import policy_title
from kvsweep.harness.replay.references import ReplayConfig
from kvsweep.harness.replay.replay_share import ReplayShare, replay_share
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import make_job

FOLDER = Path(__file__).resolve().parents[2] / "results/published/replay"
EVERY, WINDOW = 128, 64
# dynts and triattention need a head and statistics, which this model lacks; rpc's cache grows with the text.
POLICIES = (
    *("random", "random_head", "window", "streaming_llm", "sepllm", "h2o", "inertia", "tova", "snapkv", "rkv"),
    *("gkv", "vase", "caote", "longflow", "raas", "lazyeviction", "keydiff", "knorm", "lagkv"),
)


Settings = dict[str, tuple[int, str]]


def replay_of(given: argparse.Namespace, limit: int | None) -> tuple[ReplayShare, Settings]:
    """The replay of the first texts through the cells of all sizes, the question pinned inside; their settings.

    In one job, so that the texts are read once by the full cache.
    """
    jobs, settings = [], Settings()
    for rows in given.rows:
        config = compose_config(
            *("model=smollm2_135m", "model.dtype=bfloat16", "benchmark=records", "benchmark.limit=1", "policy=window"),
            *(f"policy.rows={rows}", f"policy.every={EVERY}", f"policy.local_window={WINDOW}"),
            *("policy.question=pinned", f"grid.policy=[full,{given.policies}]"),
            *(f"results_dir={given.out}", "run_name=r1"),
        )
        jobs.append(make_job(config))
        settings |= {cell.cell_id: (rows, cell.policy.name) for cell in jobs[-1].cells if cell.policy.name != "full"}
    cells = {cell.cell_id: cell for job in jobs for cell in job.cells}
    config = ReplayConfig(texts=str(given.texts), limit=limit, tokens=given.tokens)
    return replay_share(replace(jobs[0], cells=tuple(cells.values())), config), settings


def replay(given: argparse.Namespace) -> None:
    """Replay `turn` texts more until all are done; note the CPU seconds."""
    texts = len(given.texts.read_text().splitlines())
    for limit in [*range(given.turn, texts, given.turn), texts]:
        share, _ = replay_of(given, limit)
        replay_timed(share, given.out, texts=limit)


def tables(given: argparse.Namespace) -> None:
    """Write a row for each policy and size, paired with the nearest policy of that size, and the figure."""
    from kvsweep.analysis.statistics.fidelity import fidelity, paired_fidelity, rows_of_cells

    share, settings = replay_of(given, None)
    found = []
    for rows in given.rows:
        names = {cell_id: name for cell_id, (size, name) in settings.items() if size == rows}
        texts = rows_of_cells(share.job.run_directory, names, share.rows)
        # A text that no cell evicts says nothing at this size.
        texts = texts[texts["evictions"] > 0]
        whole = texts.groupby("problem_id")["cell_id"].transform("nunique") == len(names)
        table = fidelity(texts[whole]).sort_values("kl", ignore_index=True)
        pairs = paired_fidelity(texts[whole], table["cell_id"][0])[["cell_id", "difference", "p", "p_holm"]]
        found.append(table.merge(pairs, on="cell_id", how="left").assign(rows=rows, policy=table["cell_id"].map(names)))
    table = pd.concat(found, ignore_index=True)
    columns = ["rows", "policy", *table.columns.drop(["rows", "policy", "cell_id"])]
    table[columns].round(6).to_csv(FOLDER / "r1_traces.csv", index=False)
    shown = ["rows", "policy", "texts", "evictions", "kl", "kl_se", "flips", "p_holm"]
    print(table[shown].round(4).to_string(index=False))
    figure(table).savefig(FOLDER / "r1_traces.png", dpi=200)


@matplotlib.rc_context(style.STYLE)
def figure(table: pd.DataFrame) -> Figure:
    """The KL of each policy at each size, in the order of the smallest size."""
    order = list(table[table["rows"] == table["rows"].min()]["policy"])
    drawn = style.new_figure((7.1, 1 + 0.22 * len(order)))
    axis = drawn.subplots()
    for shift, (rows, own) in enumerate(table.groupby("rows")):
        places = [order.index(name) + 0.22 * (shift - 1) for name in own["policy"]]
        label = f"{rows} rows, {own['texts'].iloc[0]} texts"
        axis.errorbar(own["kl"], places, xerr=1.96 * own["kl_se"], fmt="o", ms=3.5, lw=1, label=label)
    axis.set_yticks(range(len(order)), [policy_title(name) for name in order])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("KL from the full cache, nats per token (95% over texts)")
    style.tidy(axis)
    style.legend_below(drawn)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["replay", "tables"])
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=1300, help="tokens of each text, from the first")
    parser.add_argument("--policies", default=",".join(POLICIES), help="policies, with commas")
    parser.add_argument("--turn", type=int, default=4, help="texts a turn")
    given = parser.parse_args()
    {"replay": replay, "tables": tables}[given.stage](given)


if __name__ == "__main__":
    main()
