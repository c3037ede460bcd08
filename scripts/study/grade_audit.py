"""How the grader judges recorded outputs of real models: agreement with the audited truth, and what it disagrees on.

    python scripts/study/grade_audit.py graded_outputs.jsonl --audit results/published/grading_audit.csv \\
        --hostile 10000

The rows have `benchmark`, `gold`, `tail` (the text's end), `label` (the recorder's verdict) and for some `audit` (a
careful one, which is trusted first; --audit adds more of these by id). They carry no thinking tags, so the whole tail
is read. Answers are integers on AIME and AMC, expressions elsewhere. Rows go through the same workers as a cell's, and
beside our verdicts stand those of math-verify alone on the same tails. With --mutants, so many generated cases
(grade_mutants.py) and the file's golds are changed, and the changes graded. With --hostile, so many made-up hostile
texts are graded too. With --pairs, the pairs of tests/harness/grading/pairs.py are graded by both, kind by kind; with a
file behind it, also its JSON lines with `fault`, `kind`, `gold`, `text` and `right`. The last line is one JSON object.
"""

import argparse
import json
import random
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import pandas as pd

from kvsweep.harness.grading.answers import AnswerKind, Rule, Ungraded
from kvsweep.harness.grading.grader import Grader
from kvsweep.processes.workers import Workers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.study import grade_mutants
from tests.harness.grading.pairs import PAIRS

INTEGERS = ("aime24", "amc23")
_PIECES = (
    *(
        "\\boxed{",
        "{",
        "}",
        "\\frac{",
        "\\sqrt{",
        "^{",
        "_{",
        "\\left(",
        "\\right)",
        "\\text{",
        "\\%",
        "\\pm",
        "\\infty",
    ),
    *("9^{9^{9^{9}}}", "10^{10^{10}}", "999999999999!", "2^{2^{2^{2^{2^{9}}}}}", "\\sum_{i=1}^{10^9} i", "1e999999"),
    *("\\int_0^\\infty e^{x^2} dx", "\\binom{10^6}{5000}", "\\prod_{k=1}^{n}", "1/0", "0^0", "\\sin^{-1}", "x=", "y^2"),
    *("\x00", "\u202e", "\u200f", "\ufeff", "\ud800", "é", "∛", "٣", "½", "1" * 400, "0.1", "a", "A", "(B)", "**C**"),
    *("</think>", "<think>", "$", "\\", "&", "%", "#", "\n", " ", ",", "(", ")", "answer is ", "So, "),
    *("Therefore the answer is 5.", "\\begin{matrix}1&2\\\\3&4\\end{matrix}"),
)


def hostile_texts(count: int, seed: int = 0) -> list[str]:
    """Texts made to break a grader: nested and unclosed braces, huge powers, up to a megabyte, odd characters."""
    rng = random.Random(seed)
    texts = []
    for number in range(count):
        pieces = rng.choices(_PIECES, k=rng.choice((1, 3, 8, 20, 60)))
        text = "".join(pieces)
        if number % 500 == 0:
            text = (text * (1_000_000 // max(1, len(text)) + 1))[:1_000_000]
        texts.append(rng.choice(("{}", "</think>\\boxed{{{}}}", "</think>{}")).format(text))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--audit", type=Path, help="CSV of further verdicts: benchmark, id, audit")
    parser.add_argument("--all", action="store_true", help="print every disagreement")
    parser.add_argument("--mutants", type=int, default=0, metavar="N", help="generated cases to change")
    parser.add_argument("--golds", type=Path, nargs="*", default=[], metavar="FILE", help="further golds to change")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated cases")
    parser.add_argument("--hostile", type=int, default=0, metavar="N")
    parser.add_argument("--pairs", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=5.0)
    arguments = parser.parse_args()
    with Grader(workers=arguments.workers, timeout_s=arguments.timeout) as grader:
        more = pd.read_csv(arguments.audit).set_index("id")["audit"].to_dict() if arguments.audit else {}
        result = audit(arguments.file, grader, more, show=arguments.all) if arguments.file else {}
        golds = [*filter(None, [arguments.file]), *arguments.golds]
        if arguments.mutants:
            made = [*grade_mutants.cases(arguments.mutants, arguments.seed), *grade_mutants.golds(golds)]
            result["mutants"] = grade_mutants.measured(made, grader)
        if arguments.pairs is not None:
            result["pairs"] = pairs(arguments.pairs, grader)
        if arguments.hostile:
            result["hostile"] = hostile(arguments.hostile, grader)
    print(json.dumps(result))


def alone(text: str, gold: str) -> bool:
    """math-verify's own verdict: what it extracts from the whole text against the gold, in a worker."""
    import math_verify

    parsed = [math_verify.parse(part, parsing_timeout=None) for part in (f"${gold.strip('$')}$", text)]
    return bool(math_verify.verify(*parsed, timeout_seconds=None))


def audit(path: Path, grader: Grader, more: dict[int, bool], *, show: bool, library: bool = True) -> dict[str, object]:
    """Compare the grader with the truth; `library=False` leaves out math-verify's own verdicts, which take longest."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row["id"] in more:
            row.setdefault("audit", more[row["id"]])
    truth = [bool(row.get("audit", row["label"])) for row in rows]
    jobs = [_job(row["tail"], row["gold"], "integer" if row["benchmark"] in INTEGERS else "expression") for row in rows]
    grader.judge(jobs[:200])  # so that the workers have started and imported what they need
    replies, seconds = [], []
    for start in range(0, len(jobs), 16):
        began = time.perf_counter()
        part = grader.judge(jobs[start : start + 16])
        seconds += [(time.perf_counter() - began) / len(part)] * len(part)
        replies += part
    theirs = [False] * len(jobs)
    if library:
        with Workers() as workers:
            theirs = [bool(verdict) for verdict in workers.map(alone, [(job.text, job.gold) for job in jobs])]
    classes: Counter[str] = Counter()
    agreement: dict[str, list[int]] = {}
    for row, true, reply, their in zip(rows, truth, replies, theirs, strict=True):
        correct = reply.outcome == "correct"
        counts = (correct == true, correct and not true, their == true, their and not true, 1)
        sums = agreement.setdefault(row["benchmark"], [0] * len(counts))
        agreement[row["benchmark"]] = [total + count for total, count in zip(sums, counts, strict=True)]
        if correct != true:
            name = f"{'audited' if 'audit' in row else 'recorded'} {true}, graded {reply.outcome}"
            classes[name] += 1
            if show:
                print(f"{name}: {row['benchmark']} {row['id']} gold {row['gold']!r} answer {reply.answer!r}")
                if reply.answer is None:
                    print("    ends", repr(row["tail"][-150:]))
    print(
        f"{'benchmark':16} {'rows':>5} {'agree':>8} {'false accepts':>14} {'library alone':>18} {'false accepts':>14}"
    )
    sums = [sum(values) for values in zip(*agreement.values(), strict=True)]
    for name, (agree, accepts, their_agree, their_accepts, total) in [*sorted(agreement.items()), ("all", sums)]:
        print(f"{name:16} {total:5} {agree / total:8.2%} {accepts:14} {their_agree / total:18.2%} {their_accepts:14}")
    for name, count in classes.most_common():
        print(f"{count:4} {name}")
    median = statistics.median(seconds) * 1000
    timeouts = sum(reply.outcome == "grader_timeout" for reply in replies)
    print(f"median {median:.2f} ms a row, slowest batch {max(seconds) * 1000:.1f} ms a row, {timeouts} killed")
    integers = [agreement[name] for name in INTEGERS if name in agreement]
    return {
        "rows": len(rows),
        "agreement": sums[0] / sums[4],
        "false_accepts": sums[1],
        "library_agreement": sums[2] / sums[4],
        "library_false_accepts": sums[3],
        "benchmarks": {name: {"ours": counts[0], "library": counts[2]} for name, counts in agreement.items()},
        "integer_agreement": sum(v[0] for v in integers) / max(1, sum(v[4] for v in integers)),
        "integer_false_accepts": sum(v[1] for v in integers),
        "median_ms": median,
        "grader_timeouts": timeouts,
        "classes": dict(classes),
    }


def pairs(files: list[Path], grader: Grader) -> dict[str, list[int]]:
    """Grade labelled pairs; by kind of mistake and of answer their number and the wrong accepts and rejects of both."""
    rows = [(part.mistake, part.kind, *pair, True) for part in PAIRS for pair in part.accepted]
    rows += [(part.mistake, part.kind, *pair, False) for part in PAIRS for pair in part.rejected]
    for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        rows.append((row["fault"], row["kind"], row["gold"], row["text"], row["right"]))
    ours = [reply.outcome == "correct" for reply in grader.judge([_job(row[3], row[2], row[1]) for row in rows])]
    with Workers() as workers:
        theirs = [bool(verdict) for verdict in workers.map(alone, [(row[3], row[2]) for row in rows])]
    table: dict[str, list[int]] = {}
    for (mistake, kind, *_, right), mine, their in zip(rows, ours, theirs, strict=True):
        counts = (1, mine and not right, right and not mine, their and not right, right and not their)
        for name in (f"{mistake}, {kind}", f"all, {kind}"):
            table[name] = [total + count for total, count in zip(table.get(name, [0] * 5), counts, strict=True)]
    print(f"{'pairs':46} {'n':>4} accepted, rejected wrongly: ours, math-verify alone")
    for name, (count, *wrong) in sorted(table.items()):
        print(f"{name:46} {count:4} {wrong}")
    return table


def hostile(count: int, grader: Grader) -> dict[str, object]:
    """Grade hostile texts as every kind in turn; a crash would be raised here."""
    kinds: tuple[AnswerKind, ...] = ("expression", "integer", "letter", "expression")
    golds = {"expression": "\\frac{1}{2}", "integer": "5", "letter": "C"}
    jobs = [_job(t, golds[kinds[i % 4]], kinds[i % 4]) for i, t in enumerate(hostile_texts(count))]
    began = time.perf_counter()
    replies = grader.judge(jobs)
    seconds = time.perf_counter() - began
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    outcomes = Counter(reply.outcome for reply in replies)
    print(f"hostile: {count} texts in {seconds:.0f} s, largest worker so far {largest:.0f} MiB, {dict(outcomes)}")
    return {"texts": count, "seconds": seconds, "largest_worker_mib": largest, "outcomes": dict(outcomes)}


def _job(text: str, gold: str, kind: AnswerKind) -> Ungraded:
    return Ungraded(text=text, stop_reason="stop", gold=gold, kind=kind, rule=Rule(answer_from="whole_text"))


if __name__ == "__main__":
    # Workers import `alone` from its module, and a script has none that they could import.
    from scripts.study import grade_audit

    grade_audit.main()
