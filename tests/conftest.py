"""Fixtures of all tests: one thread, a tiny untrained model beside its predictor, and the command `kvsweep`."""

import contextlib
import gc
import io
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Before torch is imported, which takes its number of threads from here.
os.environ["OMP_NUM_THREADS"] = "1"
# A second thread that waits for its turn sleeps, and takes no processor time of its test's budget on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

# A busy machine takes many times longer, and no test is about time. Each run draws the same examples.
hypothesis.settings.register_profile(
    "certain",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("certain")
ROOT = Path(__file__).resolve().parents[1]
gc.disable()  # until all is imported and collected, which leaves little garbage


def pytest_addoption(parser: pytest.Parser):
    parser.addoption("--dearest", type=int, default=0, metavar="N", help="end with the N dearest tests, in seconds")


def pytest_configure(config: pytest.Config):
    config.addinivalue_line("markers", "slow_unless(rule): slow are the cases that the rule does not accept")
    config.addinivalue_line("markers", "release_unless(rule): of the slow cases, the same for the release")
    config.addinivalue_line("markers", "covers(n): slow are cases beyond those that meet each combination of n values")
    config.addinivalue_line("markers", "slow_covers(n): of the slow cases, the same for the release")
    config.addinivalue_line("markers", "one_in(n): of n slow cases in turn, all but the first belong to the release")
    config.addinivalue_line(
        "markers", "first: takes minutes, and begun last it would keep one worker busy alone, as core would"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]):
    for item in items:
        mark_refused(item, "slow_unless", pytest.mark.slow)
    for _, function in itertools.groupby(items, lambda item: (item.path, getattr(item, "originalname", item.name))):
        cases = list(function)
        if covers := cases[0].get_closest_marker("covers"):
            mark_beyond(pytest.mark.slow, cases_without("slow", cases), *covers.args)
        slow = [case for case in cases_without("release", cases) if case.get_closest_marker("slow")]
        for case in slow:
            mark_refused(case, "release_unless", pytest.mark.release)
        if slow_covers := cases[0].get_closest_marker("slow_covers"):
            mark_beyond(pytest.mark.release, cases_without("release", slow), *slow_covers.args)
        if one_in := cases[0].get_closest_marker("one_in"):
            for number, case in enumerate(cases_without("release", slow)):
                if number % one_in.args[0]:
                    case.add_marker(pytest.mark.release)
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("first", "core")))


def cases_without(mark: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    return [case for case in cases if not case.get_closest_marker(mark)]


def mark_refused(case: pytest.Item, rules: str, mark: pytest.MarkDecorator):
    """Mark a case that a rule of its function does not accept."""
    for rule in case.iter_markers(rules):
        if not rule.kwargs["rule"](**case.callspec.params):  # type: ignore[attr-defined]
            case.add_marker(mark)


def mark_beyond(mark: pytest.MarkDecorator, cases: list[pytest.Item], strength: int):
    """Mark the cases beyond those that meet each combination of `strength` values."""
    for case in {*cases} - {*covering(cases, strength)}:
        case.add_marker(mark)


def pytest_collection_finish():
    """What was imported and collected lives to the end: no collection of garbage looks through it."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


def covering(cases: list[pytest.Item], strength: int) -> list[pytest.Item]:
    """Few cases of a product that meet each combination of `strength` parameters' values, chosen greedily.

    Kuhn, Kacker and Lei, Practical Combinatorial Testing, NIST SP 800-142 (2010).
    """
    if not cases:
        return []
    values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]  # type: ignore[attr-defined]
    columns = [[row[name] for row in values] for name in values[0]]
    factors = dict.fromkeys(tuple(map(column.index, column)) for column in columns)  # names of one list are one factor
    rows = [set(itertools.combinations(enumerate(row), strength)) for row in zip(*factors, strict=True)]
    chosen, open_ = [], set[Any]().union(*rows)
    while open_:
        best = max(range(len(cases)), key=lambda place: len(rows[place] & open_))
        chosen.append(cases[best])
        open_ -= rows[best]
    return chosen


# Processor seconds of one case of `make test`, its children's included, on a processor that counts to the yardstick's
# end in its seconds, as a quiet AMD EPYC does. What a case waits does not count: a busy machine lets it wait longer.
BUDGET, MOST = 1.5, 3
YARDSTICK, YARDSTICK_SECONDS = 4_000_000, 0.1
PRICE = "processor seconds"
FIXTURE_SECONDS = pytest.StashKey[float]()


def processor_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Measure what the case's fixtures take; they draw the same numbers, whichever tests ran before."""
    before = processor_seconds()
    seed()
    yield
    item.stash[FIXTURE_SECONDS] = processor_seconds() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail an unmarked case that takes more than three times the budget, so that `make test` stays short.

    A case that imports many modules pays for all that come after it in this process, and is not judged.
    """
    modules, before = len(sys.modules), processor_seconds()
    try:
        yield
    finally:
        worked = processor_seconds() - before
        item.user_properties.append((PRICE, item.stash[FIXTURE_SECONDS] + worked))
    free = any(item.get_closest_marker(name) for name in ("slow", "core", "release", "slurm", "browser", "gpu"))
    if worked <= MOST * BUDGET or free or len(sys.modules) >= modules + 100:
        return
    seconds = worked / slowness()
    if seconds > MOST * BUDGET:
        pytest.fail(
            f"{item.nodeid} took {seconds:.1f} s of processor time; the budget of a case is {BUDGET} s: "
            "make it cheaper, mark it slow, or core if it is one of the 15 that make test must try (CONTRIBUTING.md).",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config):
    """With --dearest, print the dearest tests: processor seconds with fixtures and children, and wall seconds."""
    limit = config.getoption("--dearest")
    if not limit:
        return
    prices = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if getattr(report, "when", None) == "call" and PRICE in properties:
                prices.append((properties[PRICE], report.duration, report.nodeid))
    prices.sort(reverse=True)
    total = sum(seconds for seconds, _, _ in prices)
    terminalreporter.section(f"{total:.0f} processor seconds in {len(prices)} tests, the {limit} dearest")
    for seconds, wall, nodeid in prices[:limit]:
        terminalreporter.write_line(f"{seconds:7.1f} s of processor  {wall:7.1f} s  {nodeid}")


def slowness() -> float:
    """How many times longer than a quiet processor this one takes now: a busy core's other half slows it."""
    before = time.process_time()
    for _ in range(YARDSTICK):
        pass
    return max(1.0, (time.process_time() - before) / YARDSTICK_SECONDS)


def seed():
    """Seed what draws numbers, as far as it is imported."""
    random.seed(0)
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random:
        numpy_random.seed(0)
    if torch:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats a stack for CUDA, each time
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def seeded():
    """A test draws the same numbers, whichever tests ran before it and whichever fixtures live longer than it."""
    seed()


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """Hydra parses each file of a configuration once in a process, and again when it has changed.

    It composes each configuration once and not twice: the first time tells it `hydra.mode`, which no test sets. The
    same files are merged once, and a defaults list that interpolates nothing needs no map of what to interpolate.
    """
    from hydra._internal import defaults_list
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.hydra import Hydra
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # fills the registry with classes of its own
    of_files, of_packages = (SourcesRegistry.instance().types[scheme] for scheme in ("file", "pkg"))
    known = dict[Any, bytes]()

    def once(load, stamp):
        def load_config(self, config_path):
            key = (self.provider, self.path, config_path, stamp(self, config_path))
            if key not in known:
                known[key] = pickle.dumps(load(self, config_path))
            result = pickle.loads(known[key])
            result.content = known[key]
            return result

        return load_config

    def merged(self, defaults, repo):
        read = (getattr(repo.load_config(one.config_path), "content", None) for one in defaults)
        key = tuple((repr(one), one.is_self, content) for one, content in zip(defaults, read, strict=True))
        if key not in known:
            known[key] = pickle.dumps(merge(self, defaults, repo))
        return pickle.loads(known[key])

    def mapped(overrides, defaults, self_added):
        needed = any(one.is_interpolation() for one in defaults)
        return interpolation(overrides, defaults, self_added) if needed else None

    def stamp(self, config_path):
        path = Path(self.path, self._normalize_file_name(config_path))
        return (found.st_mtime_ns, found.st_size, found.st_ino) if path.is_file() and (found := path.stat()) else None

    merge, interpolation = ConfigLoaderImpl._compose_config_from_defaults_list, defaults_list._create_interpolation_map
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merged)
        patch.setattr(defaults_list, "_create_interpolation_map", mapped)
        patch.setattr(of_files, "load_config", once(of_files.load_config, stamp))
        patch.setattr(of_packages, "load_config", once(of_packages.load_config, lambda *_: None))
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def copied_in_one() -> Iterator[None]:
    """A configuration is copied by pickle and not node by node, which is most of what Hydra takes to compose one."""
    from omegaconf import DictConfig

    node_by_node = DictConfig.__deepcopy__

    def copied(self, memo):
        inside, parent = self.__dict__, self.__dict__["_parent"]
        inside["_parent"] = None  # the copy has the same one
        try:
            copy = pickle.loads(pickle.dumps(self))
        except (AttributeError, TypeError, pickle.PicklingError):  # a value of the test's own
            copy = node_by_node(self, memo)
        finally:
            inside["_parent"] = parent
        copy.__dict__["_parent"] = parent
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DictConfig, "__deepcopy__", copied)
        yield


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with random weights and the toy tokenizer: it babbles, and ends about every hundredth token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from scripts.train.toy_tokenizer import build_tokenizer

    directory = tmp_path_factory.mktemp("tiny_model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            # Wide enough that a token's predecessors tell in its logits: a wrong cache shows.
            initializer_range=0.2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["toy_qwen", "toy_llama"])
def toy_and_eager(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A toy model, and its network in float64 with the eager attention of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvsweep.harness.models.config import ModelConfig
    from kvsweep.harness.models.load import load_model
    from kvsweep.harness.settings import WEIGHTS

    path = str(WEIGHTS / request.param)
    eager = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    return load_model(ModelConfig(name=request.param, title="", path=path, threads=1)), eager


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the problem files and recorded outputs; a test that needs it is marked `shared`."""
    folder = os.environ.get("KVSWEEP_SHARED")
    if not folder:
        pytest.skip("KVSWEEP_SHARED does not name the folder of the problem files")
    return Path(folder) / "data"


@pytest.fixture(scope="session")
def tiny_predictor_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random importance predictor for the tiny model."""
    import torch

    from kvsweep.compression.recorders import ImportancePredictor, save_predictor

    directory = tmp_path_factory.mktemp("tiny_predictor")
    torch.manual_seed(1)
    save_predictor(ImportancePredictor(32, (16, 8)), directory, {"made_for": "tests"})
    return directory


@pytest.fixture(scope="session")
def tiny_statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random statistics of the tiny model's queries."""
    import torch

    from kvsweep.compression.policies.triattention import save_statistics

    path = tmp_path_factory.mktemp("tiny_statistics") / "statistics.safetensors"
    torch.manual_seed(2)
    mean = torch.randn(2, 4, 4, dtype=torch.complex64)
    rotation = {"inverse_frequencies": 0.1 ** torch.arange(4), "attention_scaling": torch.tensor(1.0)}
    save_statistics(str(path), {"mean": mean, "mean_size": 1.2 * mean.abs(), **rotation}, {"hidden_size": 32})
    return path


@pytest.fixture(scope="session")
def tiny(tiny_model_dir: Path, tiny_predictor_dir: Path, tiny_statistics: Path) -> list[str]:
    """Overrides that put the tiny model in place of any other and keep every text short."""
    return [
        f"model.path={tiny_model_dir}",
        f"model.predictor={tiny_predictor_dir}",
        f"model.statistics={tiny_statistics}",
        "model.threads=1",
        "benchmark.limit=3",
        "decoding.max_new_tokens=40",
        *("model.name=toy_qwen", "model.title=Toy-Qwen"),
    ]


@pytest.fixture(scope="session")
def tiny_policy() -> list[str]:
    """Overrides that make the policy evict within the tiny model's short texts."""
    return ["policy.budget=64", "policy.local_window=8", "policy.keep_ratio=0.4"]


@pytest.fixture(scope="session")
def grading_workers() -> Iterator[Callable[[pytest.MonkeyPatch], None]]:
    """`grading_workers(monkeypatch)` lends a command the grading workers of the commands before it."""
    from pebble import ProcessPool

    from kvsweep.processes import workers

    pools: list[ProcessPool] = []

    class Lent(ProcessPool):
        def stop(self): ...

        def join(self, timeout=None): ...

    def pool(**how: Any):
        if not pools or not pools[-1].active:
            pools.append(Lent(**how))
        return pools[-1]

    yield lambda monkeypatch: monkeypatch.setattr(workers, "ProcessPool", pool)
    for lent in pools:
        ProcessPool.stop(lent)
        ProcessPool.join(lent)


@pytest.fixture
def kvsweep(
    monkeypatch: pytest.MonkeyPatch, grading_workers: Callable[[pytest.MonkeyPatch], None]
) -> Callable[..., Ended]:
    """`kvsweep("key=value", ...)` runs the command in this process."""
    from hydra.core.global_hydra import GlobalHydra

    from kvsweep.cli import main

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    grading_workers(monkeypatch)

    def run(*arguments: str):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["kvsweep", *arguments])
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
        return Ended(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def start_kvsweep(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_kvsweep("key=value", ...)` starts the command as a process of its own, for what ends a process."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, setup=""):
        """`setup` is a statement that the process runs before anything else."""
        program = f"{setup}\nfrom kvsweep.cli import main\nmain()"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def compose() -> Iterator[Callable[..., Any]]:
    """`compose("key=value", ...)` is the configuration that the command would see; options are `hydra.compose`'s."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from kvsweep.harness.settings import CONF

    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides, **options: hydra.compose("config", list(overrides), **options)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch):
    """Fail the test if it loads a model."""
    import kvsweep.harness.sweep.fill

    def load(config):
        pytest.fail(f"a model was loaded: {config.name}")

    kvsweep.harness.sweep.fill.unload()
    monkeypatch.setattr(kvsweep.harness.sweep.fill, "load_model", load)


@pytest.fixture
def model_loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the models that have been loaded, as they are loaded; none is left over from another test."""
    import kvsweep.harness.sweep.fill
    from kvsweep.harness.models.load import load_model

    loads: list[str] = []

    def load(config):
        loads.append(config.name)
        return load_model(config)

    kvsweep.harness.sweep.fill.unload()
    monkeypatch.setattr(kvsweep.harness.sweep.fill, "load_model", load)
    yield loads
    kvsweep.harness.sweep.fill.unload()


@pytest.fixture(scope="session")
def read_completions() -> Callable[[Path], dict[str, list[str]]]:
    """`read_completions(run_directory)` is every cell's lines of completions, sorted, by cell_id."""

    def read(run):
        files = sorted(run.glob("*/completions.jsonl"))
        return {file.parent.name: sorted(file.read_text().splitlines()) for file in files}

    return read


@pytest.fixture
def write_problems(tmp_path: Path) -> Callable[[Iterable[dict[str, Any]]], Path]:
    """`write_problems(rows)` writes a benchmark file of its own."""

    def write(rows, name="problems.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def no_own_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No `my_policies` of another test's folder is imported, or can be found, before and after the test."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path, "my_policies.py").is_file()])
    sys.modules.pop("my_policies", None)
    yield
    sys.modules.pop("my_policies", None)
