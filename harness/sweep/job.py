"""From a composed Hydra configuration to a checked, frozen Job. Every mistake is refused here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from kvsweep.command_line import counted
from kvsweep.compression import artifacts
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import BudgetPolicy, Policy
from kvsweep.compression.source import is_own
from kvsweep.errors import UserError
from kvsweep.escape import folder_below
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import Benchmark, load_problems
from kvsweep.harness.decode.request import DecodingConfig, build_decoding
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import BYTES, ModelSpec, read_spec
from kvsweep.harness.provenance import command_line, describe_code
from kvsweep.harness.settings import WEIGHTS, build, choices, conf_files, plain, whole_number
from kvsweep.harness.sweep.card import NOTHING_ASSUMED, UNPRICED, AssumeConfig, Card, CostConfig, known_card
from kvsweep.harness.sweep.cell import Cell, stored_scores
from kvsweep.harness.sweep.grid import build_policies, policy_file
from kvsweep.harness.sweep.server import ServedModel, asks_servers, build_servers
from kvsweep.kernels.implementation import Implementation, check_installed
from kvsweep.records import WHOLE, Shard, content_hash, grading_rule, leaves
from kvsweep.stored import StoredCell, read_cells, read_provenance

PositiveSeconds = Annotated[float, Field(gt=0, description="a number of seconds")]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The report's settings for a sequential sweep: a cell is safe if it loses fewer points than `margin`."""

    margin: Annotated[float, Field(gt=0, lt=100, description="a number of points")] = 5.0


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """A job's tracker. `conf/tracker/wandb.yaml` describes each field. A missing package raises UserError."""

    kind: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    project: str = "kvsweep"
    interval_s: PositiveSeconds = 15.0
    patience_s: PositiveSeconds = 20.0

    def __post_init__(self) -> None:
        if self.kind != "none" and find_spec(self.kind) is None:
            missing = f"tracker={self.kind} needs the package {self.kind}, which is not installed"
            raise UserError(f"{missing}: pip install 'kvsweep[{self.kind}]', or tracker=none.")


UNTRACKED = TrackerConfig()
_MOST_PAIRS = 10_000_000  # of problem and draw; each takes memory


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process: the cells of one grid, on one model and one benchmark.

    All cells share `decoding`, `seed`, `impl` and `cache`. A sequential job (`until=decided`) has rounds.
    """

    model: ModelConfig
    spec: ModelSpec | None  # what the model's config says, read once; None for a job of servers (`engine=openai`)
    benchmark: Benchmark
    cells: tuple[Cell, ...]
    decoding: DecodingConfig
    seed: int
    impl: Implementation
    draws: int  # completions per problem; in a round, the completions until its end
    slots: int | None  # sequences decoded at once; None: as many as fit
    run_directory: Path
    resolved: Mapping[str, Any]  # the whole configuration, for provenance
    invariant: bool | None = None  # true: equal bits in every batch; None: the device's default
    cache: CacheConfig = UNPACKED
    shard: Shard = WHOLE
    rounds: tuple[int, ...] = ()  # draws until the end of each round
    margin: float | None = None  # points of Pass@1 that a safe cell may lose; None without rounds
    finish: bool = False  # after the last round, decode the other draws of cells that are already decided
    inputs: Mapping[Path, str] = field(default_factory=dict)  # weight files in the cells' ids, with hashes
    card: Card | None = None  # the GPU for the estimate of --dry-run
    cost: CostConfig = UNPRICED
    assume: AssumeConfig = NOTHING_ASSUMED
    command: str = "kvsweep"
    tracker: TrackerConfig = UNTRACKED

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.benchmark.name}{self.cache.title}"

    @property
    def problem_ids(self) -> list[str]:
        return [problem.id for problem in self.benchmark.problems]

    def provenance(self, cell: Cell) -> dict[str, Any]:
        """Return where a cell's rows come from, as far as it is known before decoding or asking."""
        code = describe_code()
        return {
            "dataset_hash": cell.dataset_hash,
            "dataset_origin": self.benchmark.origin,
            "expected": len(self.problem_ids) * self.draws,
            "draws": self.draws,
            **({"rounds": list(self.rounds), "margin": self.margin} if self.rounds else {}),
            "random_weights": self.model.random_weights,
            "git": {"revision": code["git_revision"], "dirty": code["git_dirty"]},
            "packages": code["packages"],
            "config": self.resolved,
        }

    def check_inputs(self) -> None:
        """Refuse to write rows if the files have changed since their hashes went into the ids."""
        found = input_files(self.model, [cell.policy for cell in self.cells])
        # Part of a job has some of its policies, and does not need the other policies' artifacts.
        for path in sorted({*found, *(path for path in self.inputs if not path.exists())}):
            if found.get(path) != self.inputs.get(path):
                changed = f"{path} has changed since the cells of {self.name} were planned"
                raise UserError(f"{changed}: restore the file, or run the command again for cells of its new contents.")

    def scores(self, cell: Cell) -> NDArray[np.float64]:
        """Return the stored grades of one of the job's cells, [problems, draws]: 1 right, 0 wrong, NaN ungraded."""
        return stored_scores(self.stored(cell), self.problem_ids, self.draws)

    def stored(self, cell: Cell) -> StoredCell:
        return StoredCell(self.run_directory / cell.cell_id)

    def is_done(self, cell: Cell) -> bool:
        """True if the cell's DONE covers the job's completions, graded by today's rule; reads no rows."""
        return self.stored(cell).covers(self.problem_ids, self.draws, grading_rule(cell.describe()))


def changed_code(job: Job) -> str | None:
    """Return a message that names cells that are new because a policy's code has changed; None without any."""

    def without_code(described: Mapping[str, Any]) -> tuple[str, str]:
        policy = {name: value for name, value in described["policy"].items() if name != "class"}
        return described["condition"], content_hash([policy, described.get("cache")])

    own = [cell for cell in job.cells if is_own(type(cell.policy))]
    new = [cell for cell in own if not (job.run_directory / cell.cell_id).exists()]
    if not new:
        return None
    ids = {cell.cell_id for cell in job.cells}
    earlier = {without_code(has) for stored, has in read_cells(job.run_directory) if stored.name not in ids}
    changed = [cell for cell in new if without_code(cell.describe()) in earlier]
    if not changed:
        return None
    names = ", ".join(sorted({cell.policy.name for cell in changed}))
    new_ones = f"new, beside those of the earlier code: {counted(len(changed), 'cell')}"
    return f"note: the code of policy={names} has changed; {new_ones}."


def make_job(config: DictConfig) -> Job:
    """Check a composed configuration and make its job: first the settings, then the files, which take longest."""
    settings, asked, policies = _settings(config)
    data = _data(settings, asked, policies)
    shared = {name: settings[name] for name in ("model", "decoding", "seed", "impl", "cache")}
    shared |= {"benchmark": asked, "dataset_hash": data["benchmark"].content_hash}
    if data["spec"] is None:
        shared["impl"] = "openai"
    cells = [Cell(policy=policy, **shared) for policy in policies]
    job = Job(
        **settings,
        **data,
        cells=tuple({cell.cell_id: cell for cell in cells}.values()),
        run_directory=folder_below(str(config.results_dir), str(config.run_name), "run_name"),
        resolved={
            **plain(config),
            "model": {**plain(config.model), "revision": settings["model"].revision},
            **named_protocol(config),
        },
        command=command_line(),
    )
    if (count := job.draws * len(job.problem_ids)) > _MOST_PAIRS:
        raise UserError(
            f"draws={job.draws} asks for {count:,} completions a cell: at most {_MOST_PAIRS:,} are possible."
        )
    job.check_inputs()
    if job.model.revision != config.model.revision:
        _refuse_moved(job, config.model.revision or "main")
    return job


def named_protocol(config: DictConfig) -> dict[str, Any]:
    """Return the section `protocol` of a configuration that chose one; `changed` lists overridden settings."""
    if not (chosen := plain(config.get("protocol") or {})) or chosen["name"] not in choices("protocol"):
        return {}
    own = OmegaConf.load(conf_files("protocol")[chosen["name"]])
    whole, values = OmegaConf.merge(config, own), cast(dict[str, Any], OmegaConf.to_container(own))
    keys = [key for key, _ in leaves(values) if not key.startswith("protocol.")]
    changed = [key for key in keys if OmegaConf.select(config, key) != OmegaConf.select(whole, key)]
    lacking = [] if config.benchmark.name in chosen["benchmarks"] else ["benchmark.name"]
    return {"protocol": chosen | {"changed": [f"{key}={OmegaConf.select(config, key)}" for key in lacking + changed]}}


def _refuse_moved(job: Job, branch: str) -> None:
    """Refuse to resume a run if its cells come from another commit than the branch names now."""
    place, here = job.model.place, f"{job.model.place}@{job.model.revision}"
    for _, cell in read_cells(job.run_directory):
        earlier = str(cell["model"]["weights"])
        if earlier.startswith(f"{place}@") and cell["model"]["name"] == job.model.name and earlier != here:
            commit = earlier.rpartition("@")[2]
            moved = f"{branch} of {place} names commit {job.model.revision} now"
            mend = f"give model.revision={commit} to go on, or another run_name for the new commit"
            raise UserError(f"{moved}, and {job.run_directory} has cells of {commit}: {mend}.")


def _settings(config: DictConfig) -> tuple[dict[str, Any], BenchmarkConfig, list[Policy]]:
    """Return the job's fields that depend only on the configuration, the benchmark and the policies, all checked."""
    if asks_servers(config):
        model, policies = build_servers(config)
    else:
        model, policies = build(ModelConfig, "model", config.model), build_policies(config)
    settings: dict[str, Any] = {"model": replace(model, revision=model.commit or model.revision)}
    asked = build(BenchmarkConfig, "benchmark", config.benchmark)
    check_installed(config.impl)  # not check_available: the machine that submits a job to SLURM may have no GPU
    settings |= {
        "decoding": build_decoding(config.decoding),
        "cache": build(CacheConfig, "cache", config.get("cache", {})),
        "seed": whole_number("seed", config.seed, least=0),
        "draws": whole_number("draws", config.draws, least=1),
        "slots": None if config.slots == "auto" else whole_number("slots", config.slots, least=1),
        "invariant": _invariant(config.invariant),
        "shard": Shard.parse(str(config.shard)),
        "tracker": build(TrackerConfig, "tracker", config.tracker),
        "card": None if config.get("card") is None else known_card(str(config.card)),
        "cost": build(CostConfig, "cost", config.get("cost", {})),
        "assume": build(AssumeConfig, "assume", config.get("assume", {})),
        "impl": config.impl,
    }
    return settings | _rounds(config, settings["draws"], settings["cache"], policies), asked, policies


def _invariant(asked: Any) -> bool | None:
    if asked != "auto" and not isinstance(asked, bool):
        known = "true, false or auto, which is true on the CPU alone"
        raise UserError(f"invariant={asked} is unknown: choose {known}.")
    return None if asked == "auto" else asked


def _rounds(config: DictConfig, draws: int, cache: CacheConfig, policies: Sequence[Policy]) -> dict[str, Any]:
    """Return the fields that decide if and how a job runs in rounds."""
    margin = build(ReportConfig, "report", config.get("report", {})).margin
    rounds = rounds_until(config.get("until"), draws, policies)
    finish = config.get("finish", False)
    if not isinstance(finish, bool) or (finish and not rounds):
        goes_with = "goes with until=decided, as true or false"
        raise UserError(f"finish={finish} {goes_with}: add until=decided or leave it out.")
    if rounds and cache.is_packed:
        compared = "until=decided compares cells with the full cache of unpacked rows"
        no_full = f"which a job of{cache.title} does not decode"
        raise UserError(f"{compared}, {no_full}: give until=null, or cache.bits=16.")
    return {"rounds": rounds, "margin": margin if rounds else None, "finish": finish}


def _data(settings: Mapping[str, Any], asked: BenchmarkConfig, policies: Sequence[Policy]) -> dict[str, Any]:
    """Return the fields that come from files and must fit the settings: problems, weights, the model's spec."""
    model, benchmark = settings["model"], load_problems(asked)
    if isinstance(model, ServedModel):
        return {"benchmark": benchmark, "spec": None}
    inputs = input_files(model, policies)
    check_tags(model, policies)
    spec = read_spec(model)
    check_predictors(model, spec, policies)
    check_cache(settings, spec, policies)
    return {"benchmark": benchmark, "inputs": inputs, "spec": spec}


def stored_config(path: Path) -> dict[str, Any]:
    """Return a provenance file's configuration. It may be a stranger's, so everything that could act is removed.

    The policy's class comes from this installation's YAML of the same name. Of the settings of model and policy, only
    those known to ModelConfig and that YAML remain. Weights embedded in another installation are taken from this one.
    """
    try:
        stored = dict(read_provenance(path)["config"])
        model, policy, name = dict(stored["model"]), dict(stored["policy"]), str(stored["policy"]["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} names no model and policy: run the cell again.") from error
    if name not in choices("policy"):
        raise UserError(f"{path} names the policy {name}, and this kvsweep has {', '.join(choices('policy'))}.")
    own, known = policy_file(name), {field.name for field in fields(ModelConfig)}
    policy = {k: _embedded_here(v) for k, v in policy.items() if k in own} | {"_target_": None, "name": name}
    model = {k: _embedded_here(v) for k, v in model.items() if k in known}
    found = {**stored, "model": model, "policy": policy}
    found.pop("launcher", None)
    # Class, address and key variable may be a stranger's.
    if found.pop("engine", None) not in (None, {"_target_": None}):
        raise UserError(f"{path} is of a server's texts, and only those of kvsweep's own decoding can be read again.")
    if "${" in json.dumps(found):
        raise UserError(f"{path} holds ${{, which no stored setting has: restore the file, or run the cell again.")
    policy["_target_"] = own["_target_"]
    return found


def _embedded_here(value: Any) -> Any:
    """Replace a path into another installation's embedded weights, which is gone, by this installation's path."""
    name = str(value).rpartition("/harness/toy/weights/")[2]
    is_lost = name != str(value) and not Path(value).exists() and (WEIGHTS / name).exists()
    return str(WEIGHTS / name) if is_lost else value


def input_files(model: ModelConfig, policies: Sequence[Policy]) -> dict[Path, str]:
    """Return the weight files on this disk that the outputs depend on, each with its hash."""
    return model.files() | {path: digest for policy in policies for path, digest in policy.files().items()}


def rounds_until(until: Any, draws: int, policies: Sequence[Policy]) -> tuple[int, ...]:
    """Return the draws per problem until each round's end, 2, 4, 8, ..., `draws`; () if every cell gets all draws."""
    if until is None:
        return ()
    if until != "decided":
        raise UserError(f"until={until} is unknown: choose decided, or null for all draws of every cell.")
    if draws < 2:
        raise UserError(f"until=decided has no rounds with draws={draws}: give draws=2 or more, or until=null.")
    names = {policy.name for policy in policies}
    if "full" not in names or len(names) < 2:
        alone = f"compares cells with the full cache, and the grid has {', '.join(sorted(names))} alone"
        raise UserError(f"until=decided {alone}: let grid.policy name full and another policy, or give until=null.")
    return doubled(draws)


def doubled(draws: int) -> tuple[int, ...]:
    """Return 2, 4, 8, ... up to `draws`, which is at least 2."""
    return (*(2**power for power in range(1, (draws - 1).bit_length())), draws)


def check_tags(model: ModelConfig, policies: Sequence[Policy]) -> None:
    """Refuse policies that need the end of the thinking, if the model names no tag."""
    for policy in policies:
        if model.think_end is None and isinstance(policy, BudgetPolicy) and policy.THINKS:
            untagged = f"policy={policy.name} keeps the answer behind model.think_end, which is null"
            raise UserError(f"{untagged}: name the tag that closes the model's thinking, or choose another policy.")


def check_predictors(model: ModelConfig, spec: ModelSpec, policies: Sequence[Policy]) -> None:
    """Refuse artifacts made for another model."""
    for kind, place in sorted({one for policy in policies for one in policy.placed.items()}):
        if other := other_model(artifacts.read_card(kind, place), model, spec):
            mend = f"give one made for this model (`kvsweep predictor`), or take policy=window, which needs no {kind}"
            yours = "model.name=NAME model.title=TITLE name a model of your own"
            raise UserError(f"policy.{kind}={place} was made for {other}: {mend}; {yours}.")


def other_model(card: Mapping[str, Any], model: ModelConfig, spec: ModelSpec) -> str:
    """Return the other model named in an artifact's card, and this one, as text; "" if it may be this one."""
    weights = model.identity()["weights"]
    made_for = card.get("model_weights", weights)
    if card["hidden_size"] != spec.hidden_size:
        return f"hidden size {card['hidden_size']}, but model={model.name} has {spec.hidden_size}"
    # A hub id cannot be told apart from a local copy of the same weights, which is identified by a hash.
    if made_for != weights and ("@" in made_for) == ("@" in weights):
        return f"{card.get('model')} ({made_for}), but model={model.name} is {weights}"
    return ""


def check_cache(settings: Mapping[str, Any], spec: ModelSpec, policies: Sequence[Policy]) -> None:
    """Refuse policies without a layer to evict from, and a precision that is not supported or saves nothing."""
    model, cache = settings["model"], settings["cache"]
    evicting = [policy.name for policy in policies if policy.trigger(1, 0) is not None]
    if not spec.layers and evicting:
        no_rows = f"no layer of full attention, whose rows policy={evicting[0]} could evict"
        raise UserError(f"model={model.name} has {no_rows}: choose policy=full.")
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": spec.head_dim, "itemsize": BYTES[model.dtype]}
    cache.forms(spec.head_dim)
    cache.check_implementation(settings["impl"])
    for policy in policies if cache.is_packed else ():
        rows = policy.capacity(1, settings["decoding"].max_new_tokens)
        if cache.bytes_per_slot(**sizes, capacity=rows) >= UNPACKED.bytes_per_slot(**sizes, capacity=rows):
            saves_nothing = f"the {rows} rows of policy={policy.name} then take no less memory than unpacked"
            out_of_range = f"cache.residual={cache.residual} is out of range"
            raise UserError(f"{out_of_range}: with{cache.title} {saves_nothing}; choose a smaller residual.")
