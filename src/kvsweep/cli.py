"""The program `kvsweep`: KEY=VALUE words start a sweep, and a first word such as `report` names another command.

Each command imports its code when it runs, so that `--help` and Tab need neither torch nor pandas.
"""

import gc
import itertools
import math
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from click import option
from click.shell_completion import CompletionItem, shell_complete

from kvsweep.annexes import annex
from kvsweep.messages.command_line import GOES_ON, check_engine, did_you_mean, one_sentence
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import at_home

COMPLETE = "_KVSWEEP_COMPLETE"
_SHARED_MEMORY = "/dev/shm"
# The commands that go on where they stopped; "" is the sweep.
_GO_ON = ("", "predictor", "replay")
_DIR = "DIR"
_HEAD = """\
kvsweep sweeps KV-cache compression of reasoning models: it decodes, grades and tests every setting.

kvsweep -m experiment=demo launcher=local    a sweep of the embedded models, about two minutes
kvsweep report results/runs/demo             its heatmaps and numbers, one HTML file
kvsweep init DIR                             a folder of your own: a policy, problems and a sweep to change

kvsweep KEY=VALUE ...                one cell; lists under grid. make a whole grid in one job
kvsweep -m experiment=NAME ...       a ready sweep; -m KEY=A,B makes one job for each value
kvsweep ... --dry-run                an estimate of time and memory; nothing is run
kvsweep ... --cfg job                every key with its value; --info defaults-tree says where from
"""
_GROUPS = ("experiment", "protocol", "model", "benchmark", "policy", "decoding", "launcher", "tracker", "engine")
_KEYS = """\
Keys (KEY=VALUE), some of them:
  policy.keep_ratio policy.local_window policy.budget         what stays, and the trigger of evictions
  policy.question policy.sinks grid.question grid.sinks       free, pinned or on_top; first tokens kept
  grid.policy grid.keep_ratio grid.local_window grid.budget   lists, as 'grid.keep_ratio=[0.1,0.2]'
  cache.bits cache.scheme cache.format cache.scale            how rows are stored; -m cache.bits=16,8,4
  draws seed decoding.max_new_tokens benchmark.limit          how many completions, and how long
  until=decided finish decoding.stop_on_loop replay screen    when a cell, or a text, needs no more
  model.path model.dtype model.random_weights benchmark.path  weights and problems from elsewhere
  slots invariant impl shard=i/n launcher.shards              how the work is divided
  results_dir run_name                                        cells lie in results_dir/run_name/
Exit status: 0 done, 1 a job failed, 2 bad input, 3 locked by another, 4 unclear, 129, 130, 143 interrupted.
Tab completion: docs/sweep.md; Hydra's own flags: --hydra-help.
"""


class Program(click.Group):
    """The commands beside the sweep; the help and Tab know the sweep's words too."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from kvsweep.harness.settings import wrapped_choices

        formatter.write(_HEAD)
        self.format_commands(ctx, formatter)
        choices = "".join(f"  {group:<10} {wrapped_choices(group)}\n" for group in _GROUPS)
        formatter.write(f"\nChoices (GROUP=NAME):\n{choices}{_KEYS}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from kvsweep.harness.settings import completions

        items = [CompletionItem(word) for word in completions(_GROUPS, incomplete)]
        if "=" in incomplete:
            return items
        return super().shell_complete(ctx, incomplete) + items


# The help names each default, but none of a switch.
_CONTEXT = {"max_content_width": 100, "help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=Program, context_settings=_CONTEXT)
def program() -> None:
    """Sweeps of KV-cache compression for reasoning models."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with these words, or with those of the command line; docs/sweep.md has the exit codes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The program draws files alone. A notebook's kernel hands its own backend to the commands that are started there,
    # and matplotlib cannot be imported where that is not installed.
    os.environ["MPLBACKEND"] = "agg"
    if sys.stderr is not None and not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "60")  # a bar in a log has a line a minute
    if COMPLETE in os.environ:
        sys.exit(shell_complete(program, {}, "kvsweep", COMPLETE, os.environ[COMPLETE]))
    first = words[0] if words else ""
    name = first if first in program.commands else ""  # "": the sweep, or the help
    # Little of what these make is ever garbage. Python looks for it after 700 new objects, a tenth of their time.
    if name in ("judge", "report") or "--dry-run" in words:
        gc.set_threshold(50_000)
    asks_help = "-h" in words or "--help" in words
    with one_sentence(f"kvsweep {name}".rstrip(), GOES_ON if name in _GO_ON else "interrupted."):
        if words == ["--version"]:
            print(f"kvsweep {version('kvsweep')}")
            return
        _find_temporary_folder()
        if words and not name and not asks_help:
            # Letters and dashes alone are meant as a command's name; a sweep's words have other signs.
            if re.fullmatch(r"\w([\w-]*\w)?", first):
                commands = ", ".join(sorted(program.commands))
                near = did_you_mean(first, program.commands)
                hint = f"{near}Choose from {commands}, or write KEY=VALUE words for a sweep."
                raise UserError(f"{first} is no command: {hint}")
            from kvsweep.harness.command import sweep

            sweep(words)
            return
        try:
            # Without a command's name all that is left is the help.
            with program.make_context("kvsweep", words if name else ["--help"]) as context:
                program.invoke(context)
        except click.exceptions.Exit as end:
            sys.exit(end.exit_code)
        except click.ClickException as error:
            raise UserError(error.format_message()) from error


def _find_temporary_folder() -> None:
    """Let Python and its packages find a folder for temporary files where a container has a read-only root."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        if not os.access(_SHARED_MEMORY, os.W_OK):
            raise UserError("no folder for temporary files can be written to: set TMPDIR to one.") from error
        os.environ["TMPDIR"] = _SHARED_MEMORY


class _Place(click.Path):
    """A path; a shell leaves the `~` of `--out=~/x` as it is."""

    def convert(self, value: Any, *arguments: Any) -> Path:
        return Path(at_home(str(value)))


class _File(_Place):
    """A file to write, in a folder that is there."""

    def convert(self, value: Any, *arguments: Any) -> Path:
        path = super().convert(value)
        if path.is_dir() or not path.parent.is_dir():
            raise click.BadParameter(
                f"{path} is a folder, or would lie in none: name a file in a folder that is there."
            )
        return path


class _Number(click.FloatRange):
    def convert(self, *arguments: Any) -> float:
        number = super().convert(*arguments)
        if math.isnan(number):  # which no bound refuses
            raise click.BadParameter("nan is no number.")
        return number


_PLACE, _FILE = _Place(), _File()
_PLACE.name = "dir"  # what the help shows as its value
_FILE.name = "file"
_POINTS = _Number(0, 100, min_open=True, max_open=True)
_directory = click.argument("directory", metavar=_DIR, type=_PLACE)
_overrides = click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
_above_0 = click.IntRange(min=1)
_DAY_S = 86_400
# A switch.
_flag = partial(option, is_flag=True)


def _print(place: str) -> None:
    """Print a text that lies in the package."""
    print((Path(__file__).parent / place).read_text("utf-8"), end="")


def _print_columns(context: click.Context, _option: click.Parameter, given: bool) -> None:
    if given:
        _print("analysis/report/columns.txt")
        context.exit()


@program.command()
@_directory
@option("--output", type=_PLACE, help="The report's folder; by default DIR/report, for a CSV NAME_report.")
@option("--completions", metavar="N", type=click.IntRange(0), default=200_000, help="The most that the page shows.")
@option("--scale", type=click.Choice(["own", "shared", "diff_from_full"]), default="own", help="Heatmaps' colours.")
@_flag("--interval", help="Write the 95% interval under each value of the heatmaps.")
@option("--columns", metavar="N", type=_above_0, help="Heatmaps in a row; by default as many as fit.")
@_flag("--pdf", help="Write the figures as PDF too.")
@_flag("--marks", help="Draw verdicts, full caches and chance spans into the heatmaps.")
@option(
    "--width",
    metavar="INCHES",
    type=_Number(3, 60),
    help="Width of the figures; by default 3.3, a row of heatmaps 7.1.",
)
@option("--map", metavar="NAME", help="A colour map of matplotlib; by default YlGnBu, safe for colour-blind readers.")
@option("--title", metavar="TEXT", help="A title over each figure of heatmaps.")
@option("--order", metavar="NAME,...", default="", help="Benchmarks that come first, in this order.")
@option(
    "--margin",
    metavar="POINTS",
    type=_POINTS,
    help="A safe setting loses less than so many points; by default the run's report.margin, else 5.",
)
@option(
    "--watch",
    metavar="SECONDS",
    type=_Number(1, _DAY_S),
    is_flag=False,
    flag_value=30.0,
    help="While the sweep runs, make the page again every so many seconds (30) if rows have come.",
)
@option(
    "--columns-help",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_columns,
    help="What the columns of cells.csv mean.",
)
def report(**options: Any) -> None:
    """Heatmaps, numbers and one HTML page.

    They lie under DIR/report. DIR is a run's folder, such as results/runs/demo, or a CSV of scores alone, such as
    results/reference/dynts_heatmaps.csv.
    """
    from kvsweep.analysis.report.build import report

    report(**options)


@program.command()
@_directory
@_flag("--cells", help="One line per cell, with its id.")
@_flag("--watch", help="Keep showing it until nothing runs or waits.")
@option("--interval", metavar="SECONDS", type=_Number(0.1, _DAY_S), default=2.0, help="Time between two looks.")
@_flag("--json", "as_json", help="Everything, for programs.")
def status(**options: Any) -> None:
    """How far the sweep in DIR has come. The exit status is 1 if a task failed or stopped."""
    from kvsweep.harness.sweep.status import show

    sys.exit(show(**options))


@program.command()
def models() -> None:
    """Which families of models are decoded, and what of each is refused."""
    _print("harness/models/families.txt")


@program.command()
@_directory
@option("--workers", metavar="N", type=_above_0, default=2, help="Grading processes.")
@option("--timeout", metavar="SECONDS", type=_Number(0, _DAY_S, min_open=True), default=5.0, help="A row's time.")
@_flag("--all", "regrade", help="Grade again the rows that have a grade.")
@option("--why", metavar="PROBLEM", help="Grade nothing; show what decided each completion of this problem.")
def grade(**options: Any) -> None:
    """Grade stored completions, without a model.

    DIR is a run's folder or one cell's.
    """
    from kvsweep.harness.grading.grader import grade

    grade(**options)


@program.command()
@click.argument("first", metavar="A", type=_PLACE)
@click.argument("second", metavar="B", type=_PLACE)
@option("--csv", type=_FILE, help="Write a row per cell, all of them, as CSV.")
def compare(**options: Any) -> None:
    """Two runs compared cell by cell, B minus A."""
    annex("compare").compare_runs(**options)


class _Judge(click.Command):
    """A command that removes an earlier verdict before its options are checked, so that no refusal leaves it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks_help = any(word in ctx.help_option_names for word in args)
        if not ctx.resilient_parsing and not asks_help:  # else nothing is run, or the call is the one below
            from kvsweep.harness.judge import remove_verdicts

            parsed = self.make_context(ctx.info_name, [*args], resilient_parsing=True)
            # Without a file, as where an option is unknown, nothing is removed: any word may be a file to read.
            if parsed.params["files"]:
                remove_verdicts(parsed.params)
        return super().parse_args(ctx, args)


@program.command(cls=_Judge)
@click.argument("files", metavar="[NAME=]FILE [NAME=]FILE...", nargs=-1)
@option("--full", metavar="NAME", help="The baseline; by default the first file.")
@option("--control", metavar="NAME", help="The baseline asked again: whether a file changes more than chance does.")
@option("--margin", metavar="POINTS", type=_POINTS, default=5.0, help="A safe file loses less.")
@option("--bytes", "sizes", metavar="NAME=SHARE,...", multiple=True, help="What a file's cache takes, declared by you.")
@option("--correct", metavar="COLUMN", help="The column or score that says right or wrong.")
@option("--where", metavar="COLUMN=VALUE", multiple=True, help="Only rows with this value; repeatable.")
@option("--column", "columns", metavar="NAME=COLUMN", multiple=True, help="Where id, draw, text, gold ... stand.")
@option("--ignore", "ignored", metavar="COLUMN", multiple=True, help="A column that is no part of the question.")
@option("--draws", type=click.Choice(["rows"]), help="rows: a problem's draws are its rows, in their order.")
@option("--group", metavar="COLUMN", help="Problems that share its value are variants of one question.")
@option("--grades", type=click.Choice(["theirs", "ours"]), default="theirs", help="ours: kvsweep grades the texts.")
@option("--gold", metavar="FILE", type=_PLACE, help="ours: rows of id and gold; by default the golds of the outputs.")
@option("--kind", type=click.Choice(["expression", "integer", "letter"]), default="expression", help="ours: of golds.")
@option("--markdown", type=_FILE, help="Write the table for a pull request.")
@option("--html", type=_FILE, help="Write a page with both texts of each answer side by side.")
def judge(**options: Any) -> None:
    """Whether outputs of one engine or setting are worse than another's.

    Each FILE has outputs of the same problems, and so may a folder: rows (JSON lines, CSV, Parquet) of id, draw and
    correct, or what lm-evaluation-harness, inspect_ai, lighteval, NeMo Evaluator, sgl-eval, NeMo-Skills and llama-eval
    write. Files of one NAME are one setting. The exit status is 0 if all are safe, 1 if one is worse, 4 if one is
    unclear.
    """
    from kvsweep.analysis.outputs import Reading
    from kvsweep.harness.judge import judge

    words = itertools.chain(*(group.split(",") for group in options.pop("sizes")))  # "a=0.5,b=1": a=0.5 and b=1
    size_texts = _single("--bytes", words)
    reading = Reading(
        correct=options.pop("correct"),
        where=_pairs("--where", options.pop("where")),
        columns=_single("--column", options.pop("columns")),
        ignored=options.pop("ignored"),
        graded=options.pop("grades") == "theirs",
        by_rows=options.pop("draws") == "rows",
        group=options.pop("group"),
    )
    sizes = {name: _share(name, text) for name, text in size_texts.items()}
    sys.exit(judge(**options, sizes=sizes, reading=reading))


def _pairs(option: str, words: Iterable[str]) -> dict[str, list[str]]:
    """The values of each name in words NAME=VALUE."""
    values = defaultdict[str, list[str]](list)
    for word in words:
        name, equals, value = word.rpartition("=")  # the last one: a name may contain another
        if not equals:
            raise UserError(f"{option} {word} is no NAME=VALUE: write a name, an equals sign and a value.")
        values[name].append(value)
    return values


def _single(option: str, words: Iterable[str]) -> dict[str, str]:
    """The value of each name in words NAME=VALUE; UserError for a name with several."""
    single = {}
    for name, values in _pairs(option, words).items():
        if len(values) > 1:
            raise UserError(f"{option} has several values for {name} ({', '.join(values)}): give one.")
        single[name] = values[0]
    return single


def _share(name: str, text: str) -> float:
    """A file's bytes beside the full cache's, from the words of --bytes."""
    with suppress(ValueError):  # no number: refused below
        share = float(text)
        if 0 < share < math.inf:
            return share
    raise UserError(f"--bytes {name}={text} must be a number above 0: 1 is the full cache's bytes.")


@program.command()
@_directory
@option("--output", type=_PLACE, help="The dataset's folder; by default DIR/export.")
@option(
    "--format",
    "form",
    type=click.Choice(["parquet", "eee", "inspect"]),
    default="parquet",
    help="eee: Every Eval Ever's records; inspect: logs of inspect_ai, draws as epochs.",
)
@option("--cell", "cells", metavar="ID", multiple=True, help="Only this cell; repeatable.")
@_flag("--token-ids", "ids", help="The generated tokens as well.")
@_flag("--with-problems", "problems", help="Texts of gated problems too; their terms may forbid it.")
@option("--push-to-hub", metavar="NAME", help="Upload it as this dataset, private unless --public.")
@_flag("--public", help="With --push-to-hub: for everybody to see.")
@option("--bundle", type=_FILE, help="All that a colleague needs to verify the run, as one zip file.")
def export(**options: Any) -> None:
    """Completions and grades as a Hugging Face dataset.

    The folder holds Parquet files and a card, and datasets.load_dataset reads it. In another --format a cell is a JSON
    file in DIR/export_eee or DIR/export_inspect. --bundle FILE writes the run with conf, policies, problems, heads and
    hashes, from which `kvsweep verify` runs on another machine.
    """
    from kvsweep.analysis.export import export_run
    from kvsweep.analysis.other_formats import export_as

    bundle = options.pop("bundle")
    form = options.pop("form")
    if bundle is not None:
        check_engine("a bundle")
        from kvsweep.harness.sweep.bundle import write_bundle

        directory = options.pop("directory")
        problems = options.pop("problems")
        if any(options.values()) or form != "parquet":
            raise UserError("--bundle takes the whole run: of the other options it goes with --with-problems alone.")
        print(write_bundle(directory, bundle, problems=problems))
        return
    if form == "parquet":
        export_run(**options)
        return
    for name in ("ids", "push_to_hub", "public"):
        if options.pop(name):
            raise UserError("--token-ids, --push-to-hub and --public go with --format parquet alone: leave them out.")
    print(export_as(form, **options))


@program.command()
@_directory
@option("--count", metavar="N", type=_above_0, default=8, help="Completions to decode again, over cells and problems.")
@option("--seed", metavar="N", type=click.IntRange(0), default=0, help="Another seed draws other completions.")
@_flag("--all", "every", help="Decode all completions again.")
@_flag("--json", "as_json", help="Everything, for programs.")
def verify(**options: Any) -> None:
    """Whether stored results can be made again.

    Seals, ids, weights, data and the policies' code are compared first, and the texts are graded again. Then drawn
    completions of the run in DIR are decoded again by the same engine: the same bits, or the first token that differs
    with the likely cause. Nothing of the run is changed; DIR/report/verify.json has the result for the report. The exit
    status is 1 if a check fails, or a completion differs or cannot be decoded; a server's texts cannot, and count as
    read.
    """
    sys.exit(annex("verify").verify(**options))


@program.command()
@_directory
@_overrides
@_flag("--time", "timed", help="Seconds instead: each cell alone decodes the texts, in rounds.")
def replay(**options: Any) -> None:
    """How near each cell stays to the full cache.

    Known texts are fed again through every cell of the run in DIR, which evicts as in decoding. KL, log-likelihood and
    most likely tokens are compared, and no token is drawn. The same command goes on where it stopped. The numbers say
    how near a cell stays to the full cache, not whether it solves problems.

    \b
    texts=FILE      lines with id, problem and text; without it the texts that the full cache wrote
    limit=20        texts, from the first; null for all
    tokens=N        tokens of each text, from the first; null for all
    shard=i/n       only every n-th text, from the i-th
    launcher=local, launcher.KEY=VALUE   as for kvsweep
    slots=8         with --time: texts side by side in the second batch; the first has one
    memory_gb=G     with --time: a third batch, of as many texts as this memory holds keys and values of
    rounds=3        with --time: rounds, of which the median counts
    """
    check_engine("a replay")
    annex("replay").replay(**options)


@program.command()
@click.argument(
    "stage", type=click.Choice(["traces", "labels", "train", "eval", "all", "oracle", "statistics", "scales"])
)
@_overrides
def predictor(**options: Any) -> None:
    """Make an importance head for a model.

    The head learns from the model's own correct texts. Each stage goes on where it stopped.

    \b
    traces      correct completions of the model, or texts from elsewhere (recipe.import_from=DIR|FILE)
    labels      how much later tokens attend to each token, and the hidden state of each token
    train       fit the head
    eval        how well the head ranks the tokens of held-out texts
    all         these four stages
    oracle      write the labels for policy=oracle_answer and policy=oracle_far_max
    statistics  write the mean queries for policy=triattention, from recipe.text=FILE or the traces
    scales      write the largest keys and values for cache.scale=tensor, from the same

    \b
    recipe=toy|r1         settings for the embedded models, or the paper's (conf/predictor/)
    recipe.out=DIR        folder of the traces, labels and heads
    recipe.label=[answer] kinds of label: answer, far_max, later; of several kinds the head learns the sum
    model=NAME, model.KEY=VALUE, benchmark=NAME, benchmark.path=FILE, decoding.KEY=VALUE   as for kvsweep
    """
    check_engine("a predictor")
    annex("predictor").make(**options)


@program.command()
@click.argument("task", type=click.Choice(["check"]))
@click.argument("name", metavar="NAME")
@_overrides
def policy(**options: Any) -> None:
    """Try a policy on small caches before a sweep.

    NAME is a file of conf/policy, yours or a shipped one, and policy.KEY=VALUE words are its settings. The caches have
    one layer, several layers, many heads, ties, gaps of an earlier eviction, few tokens and many. A fault of the
    policy's code is named in one sentence: a wrong shape, type or device, NaN, an exception, rows that depend on chance
    or on earlier calls, or a change of the cache.
    """
    check_engine("a policy's check")
    options.pop("task")
    annex("policy").check_policy(**options)


@program.command()
@click.argument("source", metavar="DIR|FILE|live", type=_PLACE)
@_overrides
@option("--problem", metavar="ID", help="The problem; by default the first, of a cell the first with an answer.")
@option("--draw", metavar="N", type=int, default=0, help="The draw of the problem.")
@option("--question", metavar="TEXT", help="live: ask this question instead of a benchmark's problem.")
@option(
    "--show",
    type=click.Choice(["importance", "attribution", "kept", "retention", "all"]),
    default="importance",
    help="The picture; retention is one of a run's folder.",
)
@option("--label", multiple=True, metavar="KIND", help="A strip of true labels: answer, far_max, later (answer).")
@option("--head", multiple=True, type=_PLACE, help="A strip of a predictor's scores.")
@option("--scores", multiple=True, metavar="POLICY", help="A strip of a policy's scores.")
@option("--by", type=click.Choice(["token", "step"]), default="token", help="Strips of tokens, or of steps' means.")
@option("--split", metavar="REGEX", help="What separates the steps: model.split, else blank lines, else equations.")
@option("--steps", metavar="A-B,C-D", help="First and last token of each step, counted in the thinking from 0.")
@option("--find", metavar="REGEX", help="The steps to attribute; by default equations with what they state.")
@option("--map", metavar="NAME", help="attribution: a colour map of matplotlib (RdBu; RdYlGn is the paper's).")
@option("--out", type=_PLACE, default="trace", help="Folder for the files.")
def trace(**options: Any) -> None:
    """Pictures of one completion, with its numbers.

    The source is a cell's folder, a file of texts, or live, to write a completion now. KEY=VALUE words say for a
    folder where the model lies now, for a file which model, and for live all settings of a sweep but its grid. --label,
    --head and --scores can be repeated.
    """
    check_engine("a trace")
    annex("trace").trace(**options)


@program.command()
@click.argument("folder", metavar=_DIR, type=_PLACE)
def init(folder: Path) -> None:
    """A folder of your own, to change.

    It gets a policy, problems and a sweep, and conf/ for more of them.
    """
    from kvsweep.harness.command import init

    init(folder)


if __name__ == "__main__":
    main()
