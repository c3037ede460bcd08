"""README, CONTRIBUTING and the pages of docs can be typed as they stand: each block, command and link works."""

import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import kvsweep as kvsweep_package
from kvsweep.cli import program as program_group
from kvsweep.compression.policy import AttentionMass, CacheView, HeadPolicy, LastUse, RecentQueries, RowMemory
from kvsweep.compression.recorders import RECORDERS
from kvsweep.harness.command import init
from kvsweep.harness.predictor.recipe import read_settings
from kvsweep.harness.settings import CONF, WEIGHTS
from tests.compression.views import view_at

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OPTIONS = {f"wrong_{i}": 10 + i for i in (1, 2, 3)}


class Block(NamedTuple):
    document: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    """Every fenced block, its list indentation taken off."""
    for document in DOCUMENTS:
        lines = iter((ROOT / document).read_text().splitlines())
        for line in lines:
            if line.strip().startswith("```"):
                indent = line.index("`")
                text = []
                while (inside := next(lines)).strip() != "```":
                    text.append(inside[indent:])
                yield Block(document, line.strip("` "), "\n".join(text))


BLOCKS = list(blocks())


def the_block(language: str, holding: str) -> str:
    """The only block of its language that holds a text."""
    (text,) = [block.text for block in BLOCKS if block.language == language and holding in block.text]
    return text


def typed(blocks: list[Block]) -> Iterator[str]:
    """Every command of the shell blocks, comments off and continued lines joined."""
    for block in blocks:
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                if command := re.sub(r"\s+", " ", re.sub(r"(^|\s)#.*", "", line)).strip():
                    yield command


def inline() -> Iterator[str]:
    """Every piece of code within the text, once."""
    found: dict[str, None] = {}
    for document in DOCUMENTS:
        text = re.sub(r"^ *```.*?^ *```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
        found |= dict.fromkeys(code.replace("\\|", "|") for code in re.findall(r"`([^`\n]+)`", text))
    yield from found


TYPED = list(typed(BLOCKS))
INLINE = list(inline())


FULL = "553cafc26b300795"
# What a reader fills in, as the tests do.
PLACES = {"DIR": "results/runs/demo", "A": "results/runs/demo", "B": "results/runs/demo", "PROBLEM": "add-000"}


def filled(command: str) -> str:
    """A command that reads a run with the stored one for it, whose only benchmark is toy_add."""
    if " init " in command:
        return command
    command = " ".join(PLACES.get(word, word) for word in command.split(" "))
    if "results/runs/" in command:
        command = command.replace("/CELL", f"/{FULL}").replace("chain", "add")
    return re.sub(r"results/runs/\w+", PLACES["DIR"], command)


def is_whole(command: str) -> bool:
    """True if a command in the text can be typed as it stands, without a place to fill in."""
    words = command.split()[1:]
    return words[1:] != [] and words[1][0] != "-" and not re.search(r"\.\.\.|[A-Z*|]", " ".join(words))


# --- Shell --------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path, monkeypatch, kvsweep) -> Path:
    """A folder to type in, which has a finished run of an embedded model."""
    ignored = shutil.ignore_patterns("7fe18a28abf102f0")  # which has one shard of two
    shutil.copytree(ROOT / "results/reference", tmp_path / "results/reference")
    shutil.copytree(ROOT / "tests/stored/8ed060b", tmp_path / PLACES["DIR"], ignore=ignored)
    monkeypatch.chdir(tmp_path)
    kvsweep("grade", PLACES["DIR"])
    return tmp_path


# Not tried: what fetches, installs, waits for a server, trains for minutes, or has a test elsewhere (test_paper.py,
# test_demo_in_pandas.py, test_commands.py, test_judge.py). The words of `predictor` are read.
NOT_TRIED = ("eval", "pip", "export", "hf", "COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}")
COMMANDS = [*TYPED, *(code for code in INLINE if code.startswith("kvsweep ") and is_whole(filled(code)))]


@pytest.mark.parametrize("command", dict.fromkeys(map(filled, COMMANDS)))
@pytest.mark.slow_unless(rule=lambda command: not re.search("=|report|replay|verify|trace", command))
def test_every_command_works(command, desk, request, kvsweep):
    """A command is run on a small run; a sweep is planned, and with embedded models decoded with short texts."""
    name, *words = shlex.split(command)
    while "=" in name and name not in NOT_TRIED:  # a variable
        name, *words = words
    if name.startswith("scripts/"):
        assert (ROOT / name).is_file()
    elif name in ("make", "python"):
        assert can_be_typed(name, words)
    elif name in NOT_TRIED or re.search(r"fading| \w+\.jsonl", command):
        return
    elif words[0] == "predictor":
        assert read_settings([word for word in words[2:] if "DIR" not in word])
    elif words[0] in program_group.commands or "--cfg" in words:
        ended = kvsweep(*words)
        assert ended.code == 0, ended.err
    else:
        plan = kvsweep("--dry-run", *words, *without_network(words, request))
        assert plan.code == 0, plan.err
        assert "nothing was run" in plan.out
        if ("toy_" in command or "=demo" in command) and "launcher" not in command and "aime" not in command:
            ended = kvsweep(*words, "benchmark.limit=1", "decoding.max_new_tokens=8", "results_dir=tried")
            assert ended.code == 0, ended.err


def can_be_typed(name: str, words: list[str]) -> bool:
    """Whether `make` has these targets, or `python` this file."""
    return set(words) <= MAKE_TARGETS if name == "make" else words[0] == "-m" or (ROOT / words[0]).is_file()


def without_network(words: list[str], request: pytest.FixtureRequest) -> list[str]:
    """Overrides for the places that a reader has: a model and its head, and a file of problems."""
    given = {word.partition("=")[0] for word in words}
    settings = request.getfixturevalue("tiny")[:2] if given & {"model.path", "model.predictor"} else []
    if "benchmark.path" not in given:
        return settings
    rows = [{"id": i, "problem": f"{i}+1?", "answer": i + 1, **OPTIONS} for i in (1, 2)]
    return [*settings, f"benchmark.path={request.getfixturevalue('write_problems')(rows)}"]


@pytest.mark.parametrize("command", [c for c in INLINE if c.split()[0] in {"python", "make", "pip"}])
def test_every_command_in_the_text_is_there(command):
    name, *words = shlex.split(command)
    if name != "pip":
        assert can_be_typed(name, words)
    elif "kvsweep" in command:
        (extra,) = re.findall(r"kvsweep\[(\w+)\]", command)
        assert extra in PROJECT["optional-dependencies"]


# Every word of the code in quotes that looks like a file's name: what a run or a report writes is among them.
CODE = (path.read_text() for room in ("src", "analysis", "harness") for path in (ROOT / room).rglob("*.py"))
FILES_OF_RUNS = {name for text in CODE for name in re.findall(r'"(\w+\.(?:md|yaml|csv))"', text)}


@pytest.mark.parametrize("code", [c for c in INLINE if re.fullmatch(r"[\w./]+\.(py|yaml|md|csv)", c)])
def test_every_file_that_is_named_exists(code):
    if re.search("NAME|oldest|fading|my_policies", code):  # which a newcomer is to write
        return
    if "/" not in code and code.endswith(".py"):
        (place,) = [path for folder in ("scripts", "tests") for path in (ROOT / folder).rglob(code)]
        code = place.relative_to(ROOT).as_posix()
    assert (ROOT / code).exists() or ("/" not in code and code in FILES_OF_RUNS)


def test_every_script_is_listed():
    listed = (ROOT / "scripts" / "README.md").read_text()
    files = [path for path in (ROOT / "scripts").glob("*/*.*") if path.suffix in (".py", ".sh")]
    scripts = [path.name for path in files if path.suffix == ".sh" or "__main__" in path.read_text()]
    assert len(scripts) > 30
    assert [name for name in scripts if name not in listed] == []


KEYS = [code for code in INLINE if re.fullmatch(r"-?[a-z_]+(\.[a-z_0-9]+)*=\S*", code)]


@pytest.fixture(scope="module")
def composed() -> list[Any]:
    """Configurations that together have every key."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        chosen = (["launcher=slurm", "tracker=wandb"], ["model=r1_qwen_7b", "engine=openai"])
        found = [hydra.compose("config", overrides) for overrides in chosen]
    return [*found, OmegaConf.load(CONF / "predictor/r1.yaml")]


@pytest.mark.parametrize("code", KEYS)
def test_every_key_and_choice_exists(code, composed):
    key, _, value = code.partition("=")
    if (CONF / key).is_dir() or key == "recipe":
        group = "predictor" if key == "recipe" else key
        names = {path.stem for path in (CONF / group).glob("*.yaml")}
        assert not value or {*value.split(",")} <= names or value == value.upper()
        return
    if re.search(rf"^ *{re.escape(key)}=", program_group.commands["replay"].help or "", re.MULTILINE):
        return
    missing = object()
    assert any(OmegaConf.select(config, key, default=missing) is not missing for config in composed)


def test_blocks_keys_and_commands_are_found():
    assert {"benchmark.path=FILE", "recipe=r1", "policy.question=on_top", "launcher.shards=n"} <= set(KEYS)
    assert {"kvsweep -m experiment=methods", "kvsweep status results/runs/demo --watch"} <= set(map(filled, COMMANDS))


def test_the_cell_of_the_page_has_keys_that_cells_have(compose, tmp_path):
    from kvsweep.harness.sweep.job import make_job

    overrides = ["model=toy_llama", "policy=dynts", "cache.bits=4", f"results_dir={tmp_path}"]
    settings = make_job(compose(*overrides)).cells[0].describe()
    example = yaml.safe_load(the_block("yaml", "cell_id: "))
    for section in ("model", "benchmark", "policy", "decoding", "cache"):
        assert example.pop(section).keys() <= settings[section].keys(), section
    assert example.keys() <= settings.keys()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", (ROOT / document).read_text())
    folder = (ROOT / document).parent
    assert [link for link in links if not link.startswith("http") and not (folder / link).exists()] == []


def test_the_table_of_policies_has_them_all():
    text = (ROOT / "docs/policies.md").read_text()
    names = {path.stem for path in (CONF / "policy").glob("*.yaml")} - {
        p.stem for p in CONF.glob("policy/dynts_*.yaml")
    }
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
    papers = re.findall(r"^\| `\w+`.*? \(\[\d{4}\.\d{5}\]", text, re.MULTILINE)
    assert len(papers) == 1 + 19  # DynTS, and the 19 of the first lines
    assert "21 other methods (19 of papers, the newest tokens, and chance)" in text


def test_the_page_of_choices_has_every_benchmark_and_experiment():
    page = (ROOT / "docs/problems.md").read_text()
    for group, heading in (("benchmark", "Benchmarks"), ("experiment", "Experiments")):
        table = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        named = re.findall(
            r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
        )
        assert set(named) == {path.stem for path in (CONF / group).glob("*.yaml")}


# --- Python and YAML ----------------------------------------------------------------------------------------


def test_every_block_has_its_test():
    known = [
        ("python", "class Oldest(BudgetPolicy):\n    def"),
        ("python", "class Fading(BudgetPolicy)"),
        ("yaml", "name: fading"),
        ("yaml", "cell_id: "),
        ("python", "kvsweep.generate("),
        ("python", "kvsweep.load_run("),
    ]
    others = {block.text for block in BLOCKS if block.language in ("python", "yaml")}
    assert others == {the_block(*block) for block in known}


def test_the_numbers_of_the_page_are_those_of_the_run(desk, capsys):
    exec(the_block("python", "kvsweep.load_run("), {})
    assert "dynts" in capsys.readouterr().out


@pytest.mark.slow
def test_the_engine_of_the_page_evicts(capsys):
    source = the_block("python", "kvsweep.generate(")
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
    names: dict[str, Any] = {}
    exec(source, names)
    completion = names["completion"]
    assert completion.evictions
    # "on_top" keeps the whole question beside the budget and the row of the evicting step.
    assert completion.peak_length == completion.prompt_tokens + 129
    assert f"{len(completion.evictions)} evictions" in capsys.readouterr().out
    assert completion.text.endswith(r"\boxed{7}")
    exec(source.replace("local_window=64", "local_window=48"), names)
    assert names["completion"].text.endswith(r"\boxed{5}")


def run_loop(budget: int, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """The page's own loop with another budget: what it prints, and its names."""
    source = (ROOT / "docs/own_loop.py").read_text()
    assert "question, budget, window = len(text), 128, 40" in source
    names: dict[str, Any] = {}
    exec(source.replace("len(text), 128, 40", f"len(text), {budget}, 40"), names)
    return capsys.readouterr().out, names


@pytest.mark.slow
def test_the_loop_of_the_page_holds_to_its_budget(capsys):
    output, names = run_loop(128, capsys)
    cache = names["cache"]
    assert len(names["text"]) > 129 >= cache.lengths[0]
    # 2 x layers x heads x rows x width x bytes of each: what the text's length does not change.
    config = names["model"].config
    width = config.hidden_size // config.num_attention_heads
    expected = 2 * config.num_hidden_layers * config.num_key_value_heads * 129 * width * 4
    assert f"{expected:,} bytes" in output
    asked = Tokenizer.from_file(str(WEIGHTS / "toy_qwen/tokenizer.json")).encode(names["chat"][0]["content"]).ids
    assert names["text"][2 : names["question"] - 2] == asked
    assert "So r is 9." in output
    assert "r is 7" in output
    assert r"\boxed{5}" in output


@pytest.mark.slow
def test_the_loop_of_the_page_is_the_models_own_where_nothing_is_evicted(capsys):
    output, names = run_loop(600, capsys)
    assert r"\boxed{7}" in output
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / "toy_qwen", dtype="float32")
    question = torch.tensor([names["text"][: names["question"]]])
    own = model.generate(question, max_new_tokens=600, do_sample=False)[0].tolist()
    assert names["text"] == own
    assert own[-1] == names["tokenizer"].eos_token_id


def test_the_policy_of_readme_keeps_the_oldest():
    names = {"BudgetPolicy": kvsweep_package.BudgetPolicy, "CacheView": CacheView, "Tensor": torch.Tensor}
    exec(the_block("python", "class Oldest(BudgetPolicy):\n    def"), names)
    policy = names["Oldest"](name="oldest", keep_ratio=0.5, local_window=2, budget=10)
    # Of the 7 rows outside the window the first 3 stay.
    assert policy.select(view_at(torch.arange(9))).keep.tolist() == [0, 1, 2, 7, 8]


@pytest.fixture
def own_policies(tmp_path, monkeypatch, no_own_module) -> Path:
    """A folder of `kvsweep init` with the classes of docs/your_policy.md, each with its YAML."""
    init(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    Path("my_policies.py").write_text(the_block("python", "class Fading(BudgetPolicy)"))
    Path("conf/policy/spread.yaml").unlink()
    printed = the_block("yaml", "name: fading") + "\n"
    assert "`fading.yaml`" in (ROOT / "docs/your_policy.md").read_text()
    Path("conf/policy/fading.yaml").write_text(printed)
    for name, own in (("LoudValues", ""), ("Peak", "observation_window: 4\npooling: 5\n")):
        text = printed.replace("Fading", name).replace("fading", name.lower()).replace("decay: 0.9\n", own)
        Path(f"conf/policy/{name.lower()}.yaml").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_the_policies_of_the_page_have_no_fault_and_are_swept(own_policies, kvsweep):
    for name in ("fading", "loudvalues", "peak"):
        ended = kvsweep("policy", "check", name)
        assert not ended.err
        assert (ended.code, ended.out.splitlines()[-1]) == (0, f"policy={name}: no fault found.")
    assert kvsweep("policy", "check", "fading", "policy.decay=2").code == 2
    commands = [shlex.split(command)[1:] for command in TYPED if "policy=fading" in command]
    assert [kvsweep(*words).code for words in commands] == [0, 0]
    assert "3 cells" in kvsweep(*commands[1]).out
    ended = kvsweep("policy=fading", "grid.policy=[full]", "grid.beside=[{policy:[fading],decay:[0.8]}]", "--dry-run")
    assert ended.code == 2
    assert "grid.beside.decay is not a setting" in ended.err


def table_of(document: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by their first cell."""
    text = (ROOT / document).read_text().partition(f"## {heading}\n")[2]
    rows = [line.strip()[1:-1].split("|") for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {re.sub(r"\(.*", "", row[0].strip(" `")): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_fields_and_signals_of_the_page_are_those_of_an_eviction():
    """What the engine shows a policy, at a real eviction, has the shapes and types of the page's tables."""
    toy_qwen, seen = kvsweep_package.load_model("toy_qwen"), list[CacheView]()
    recorded = (AttentionMass(), RecentQueries(3), LastUse(0.1), RowMemory("watcher"))

    @dataclass(frozen=True, kw_only=True)
    class Watcher(HeadPolicy):
        signals = recorded

        def scores(self, view):
            seen.append(view)
            return view.positions

    watcher = Watcher(name="watcher", keep_ratio=0.5, local_window=8, budget=64)
    kvsweep_package.generate(toy_qwen, watcher, ["1 + 1 = ?"], max_new_tokens=70)
    view, spec = seen[0], toy_qwen.spec
    sizes = {"layers": spec.layers, "kv_heads": spec.kv_heads, "q_heads": spec.q_heads, "head_dim": spec.head_dim}
    sizes |= {"cached tokens": view.length, "text length": len(view.text_ids), "window": 3, "2": 2}

    def holds(tensor, shape, kind):
        wanted = [sizes[name] for name in ", ".join(re.findall(r"\[(.*?)\]", shape)).split(", ")]
        wanted = [*(view.positions.shape[:-1] if shape.startswith("H ") else ()), *wanted]
        assert list(tensor.shape) == wanted, shape
        assert str(tensor.dtype).removeprefix("torch.") == kind.replace("the model's", "float32"), shape

    fields_of_page = table_of("docs/your_policy.md", "The fields of CacheView")
    assert list(fields_of_page) == list(CacheView.__dataclass_fields__)
    for name, (shape, kind, _) in fields_of_page.items():
        value = getattr(view, name)
        tensor = value() if callable(value) and shape else value
        if shape.startswith("layers"):
            assert len(value) == spec.layers
            tensor = value[0]
        if shape:
            holds(tensor, shape.removeprefix("layers × "), kind)
    signals_of_page = table_of("docs/your_policy.md", "The signals")
    assert set(signals_of_page) == {cls.__name__ for cls in RECORDERS}
    for signal in recorded:
        shape, kind, _ = signals_of_page[type(signal).__name__]
        holds(view.signals[signal], shape, kind)
