"""The installed package is whole: the wheel holds every file that is read at run time, and works away from here."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvsweep.harness import command

ROOT = Path(__file__).resolve().parents[1]
# The folders of the repository that the wheel holds below `kvsweep`.
FOLDERS = ("kernels", "compression", "harness", "analysis", "conf", "results/reference")


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Mapping[str, Path]:
    """The wheel and the sdist of this tree, by kind."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.fixture(scope="module")
def unpacked(build, tmp_path_factory) -> Path:
    """A folder like site-packages with nothing but the wheel in it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(build["wheel"]) as wheel:
        wheel.extractall(folder)
    return folder


def run_from(site: Path, program: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, with the packages of `site` before those that are installed."""
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def files_of(base: Path) -> dict[str, bytes]:
    """The contents of every file below a folder, by its path within the folder."""
    paths = (path for path in base.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(base).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.core
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(unpacked):
    expected = {f"{folder}/{name}": data for folder in FOLDERS for name, data in files_of(ROOT / folder).items()}
    package = ROOT / "src" / "kvsweep"
    expected |= {path.name: path.read_bytes() for path in package.iterdir() if path.is_file()}
    for folder in ("run_files", "messages", "processes"):
        expected |= {f"{folder}/{name}": data for name, data in files_of(package / folder).items()}
    assert all(any(name.startswith(folder) for name in expected) for folder in FOLDERS)
    assert files_of(unpacked / "kvsweep") == expected
    assert {path.name.partition("-")[0] for path in unpacked.iterdir()} == {"kvsweep"}


@pytest.mark.slow  # a second build
def test_the_sdist_makes_the_same_wheel(build, unpacked, tmp_path):
    shutil.unpack_archive(build["sdist"], tmp_path)
    (tree,) = tmp_path.iterdir()
    assert not (tree / "results/runs").exists()
    assert (tree / "tests/test_package.py").is_file()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(command, cwd=tree, capture_output=True, timeout=300, check=True)
    with zipfile.ZipFile(next((tmp_path / "again").glob("*.whl"))) as again, zipfile.ZipFile(build["wheel"]) as wheel:
        assert sorted(again.namelist()) == sorted(wheel.namelist())


# Each tracked file matches one of these patterns.
TRACKED = (
    r"(kernels|compression|harness|analysis|src/kvsweep|tests|scripts)/([a-z0-9_/]+/)?[a-z0-9_]+\.py",
    r"src/kvsweep/(py\.typed|kernels|compression|harness|analysis|conf|results)",
    r"analysis/report/templates/[a-z0-9_.]+\.(jinja|js|css)|analysis/report/columns\.txt|harness/models/families\.txt",
    r"harness/template/[A-Za-z0-9_./]+",
    r"harness/toy/weights/[a-z0-9_/]+\.(json|jsonl|jinja|safetensors)",
    r"conf/([a-z0-9_/]+/)?[A-Za-z0-9_]+\.(yaml|jinja)",
    r"docs/[A-Za-z0-9_/]+\.(md|py|png|svg|gif|ipynb)",
    r"results/README\.md|results/(published|reference)/[A-Za-z0-9_./-]+",
    r"scripts/([a-z0-9_/]+/)?[A-Za-z0-9_]+\.(sh|md|txt)",
    r"tests/(stored|analysis/judged)/[A-Za-z0-9_./-]+",
    r"tests/[a-z_/]+\.(npz|jsonl|json|js|sh|txt)",
    r"\.github/[A-Za-z_/]+\.(yaml|yml|md)",
    r"[A-Z]+\.md|CITATION\.cff|LICENSE|Makefile|mkdocs\.yml|pyproject\.toml|constraints\.txt|\.ci/run",
    r"\.gitignore|\.pre-commit-config\.yaml",
)


def test_every_tracked_file_is_one_that_the_repository_means_to_have():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    names = listing.stdout.split("\0")[:-1]
    assert len(names) > 500
    unexpected = [name for name in names if not any(re.fullmatch(pattern, name) for pattern in TRACKED)]
    assert unexpected == []
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9._/-]+", name)] == []


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    entry = (ROOT / "README.md").read_text().partition("```bibtex")[2]
    assert f"version = {{{project['version']}}}" in entry
    [author] = citation["authors"]
    assert f"author = {{{{{author['name']}}}}}" in entry


@pytest.mark.slow
@pytest.mark.release
def test_the_wheel_sweeps_grades_and_reports_away_from_the_repository(unpacked, tmp_path):
    program = (
        "import sys\n"
        "from kvsweep.analysis.statistics.grids import REFERENCE\n"
        "from kvsweep.cli import main\n"
        "from kvsweep.harness.settings import CONF\n"
        "print(CONF, REFERENCE)\n"
        "main(sys.argv[1:])\n"
        "main(['report', 'results/demo'])\n"
    )
    sweep = ["-m", "experiment=demo", "benchmark=toy_add", "benchmark.limit=1", "grid.keep_ratio=[0.3]"]
    settings = ["model=toy_qwen,toy_llama", "grid.local_window=[48]", "grid.beside=[]", "results_dir=results"]
    ended = run_from(unpacked, program, *sweep, *settings, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    places = ended.stdout.splitlines()[0].split()
    assert places == [str(unpacked / "kvsweep/conf"), str(unpacked / "kvsweep/results/reference")]
    # The full cache and one DynTS cell for each of the two embedded models.
    assert len(list((tmp_path / "results/demo").glob("*/DONE"))) == 4
    assert (tmp_path / "results/demo/report/report.html").is_file()


@pytest.mark.slow  # five processes of the wheel, beside those of the test before
def test_a_folder_of_ones_own_works_from_the_wheel(unpacked, tmp_path):
    def kvsweep(*words: str, folder):
        program = "from kvsweep.cli import main; main()"
        return run_from(unpacked, program, *words, folder=folder)

    assert kvsweep("init", "mine", folder=tmp_path).returncode == 0
    mine = tmp_path / "mine"
    refused = kvsweep("init", "mine", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.endswith("is there already: name a new folder, or an empty one.\n")
    # In processes of their own, which must find the class too.
    sweep = ["-m", "experiment=mine", "benchmark.limit=2", "grid.keep_ratio=[0.2]", "grid.local_window=[32]"]
    ended = kvsweep(*sweep, "launcher=local", folder=mine)
    assert ended.returncode == 0, ended.stderr
    names = {yaml.safe_load(path.read_text())["policy"]["name"] for path in mine.glob("results/runs/mine/*/cell.yaml")}
    assert names == {"full", "dynts", "random", "spread"}
    assert len(list(mine.glob("results/runs/mine/*/DONE"))) == 4
    assert "spread" in kvsweep("--help", folder=mine).stdout
    assert "spread" not in kvsweep("--help", folder=tmp_path).stdout


def test_a_folder_from_a_read_only_package_can_be_changed(tmp_path, monkeypatch):
    package = tmp_path / "package"
    shutil.copytree(command.TEMPLATE, package)
    for path in [package, *package.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr(command, "TEMPLATE", package)
    command.init(tmp_path / "mine")
    assert [path for path in (tmp_path / "mine").rglob("*") if not path.stat().st_mode & stat.S_IWUSR] == []


# A container: nothing but results_dir can be written to, and the user has no name, no home and no locale.
BOX = """
mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,ro,bind / && cd / || exit 99
exec unshare -U --map-user=23456 --map-group=23456 env -u HOME -u USER -u LOGNAME -u XDG_CACHE_HOME -u TMPDIR \\
    LC_ALL=C PYTHONPATH="$1" PYTHONSAFEPATH=1 "${@:2}"
"""


@pytest.mark.slow  # the processes of a demo
@pytest.mark.release
def test_the_demo_of_the_wheel_runs_in_a_container(unpacked, tmp_path):
    def boxed(*words: str):
        box = ["unshare", "-m", "bash", "-c", BOX, str(tmp_path), str(unpacked), *words]
        return subprocess.run(box, capture_output=True, text=True, timeout=600, check=False)

    if shutil.which("unshare") is None or boxed("touch", str(tmp_path / "one")).returncode != 0:
        pytest.skip("this user cannot make namespaces")
    assert boxed("touch", str(unpacked / "one")).returncode != 0
    program = [sys.executable, "-c", "from kvsweep.cli import main; main()"]
    sweep = ["-m", "experiment=demo", "launcher=local", "draws=1", "benchmark.limit=3", "benchmark=toy_chain"]
    ended = boxed(*program, *sweep, f"results_dir={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "demo").glob("*/DONE"))) == 25
    ended = boxed(*program, "report", str(tmp_path / "demo"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "demo/report/report.html").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "demo"}


@pytest.mark.slow  # installs a package
@pytest.mark.release
def test_hugging_faces_kernels_and_ours_do_not_meet(unpacked, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(unpacked, site)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), "kernels"]
    ended = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    program = (
        "import pathlib, kernels, kvsweep.kernels.reference, kvsweep.compression.cache\n"
        "from kernels import get_kernel\n"
        "from transformers import LlamaForCausalLM, Qwen2ForCausalLM\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "theirs, ours = pathlib.Path(kernels.__file__), pathlib.Path(kvsweep.kernels.__file__)\n"
        f"assert theirs.parents[1] == pathlib.Path({str(site)!r}) == ours.parents[2], (theirs, ours)\n"
        "assert not {'harness', 'analysis', 'compression'} & {p.name for p in theirs.parents[1].iterdir()}\n"
        "from kvsweep.cli import main as command\n"
        "command()\n"
    )
    run = run_from(site, program, "benchmark.limit=2", "results_dir=results", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "No module named 'harness'" in run_from(site, "import harness", folder=tmp_path).stderr


@pytest.mark.slow
def test_the_package_offers_what_a_notebook_needs_and_imports_nothing_before(tmp_path):
    program = (
        "import sys, kvsweep\n"
        "assert not {'torch', 'pandas', 'hydra', 'transformers'} & sys.modules.keys()\n"
        "names = [name for name in dir(kvsweep) if not name.startswith('_') and name not in vars(kvsweep)]\n"
        "assert len(names) == 23 and all(getattr(kvsweep, name).__name__ == name for name in names)\n"
        "try: kvsweep.nothing\n"
        "except AttributeError as error: assert 'load_run' in str(error)\n"
        "else: raise SystemExit('kvsweep.nothing is there')\n"
    )
    ended = run_from(ROOT / "src", program, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_every_dependency_is_bounded_by_what_the_tests_ran_with():
    """The upper bound is at most the next major version (of 0.x the next minor) after the pinned one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip()]
    pinned = {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(line for lines in extras.values() for line in lines)]:
        needed = Requirement(text)
        if needed.name == "kvsweep":  # another extra of its own
            continue
        [bound] = [Version(part.version) for part in needed.specifier if part.operator == "<"] or [None]
        assert bound is not None, f"{text} has no upper bound"
        if any(text in extras[extra] for extra in ("wandb", "trackio", "mlflow", "smollm2", "site")):
            continue  # not installed where the tests run
        proven = pinned[canonicalize_name(needed.name)]
        assert needed.specifier.contains(proven), text
        major, minor = proven.major, proven.minor
        assert bound <= (Version(f"{major + 1}") if major else Version(f"0.{minor + 1}")), text
        assert needed.specifier.contains(version(needed.name)), f"{needed.name} is installed out of its bounds"
