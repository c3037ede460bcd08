"""A branch of the hub is a way to find a commit, and no identity."""

from collections.abc import Callable, Iterator

import pytest
from huggingface_hub import constants

from kvsweep.harness.models import hub
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.hub import commit_of
from kvsweep.harness.settings import WEIGHTS, compose_config
from kvsweep.harness.sweep import job
from kvsweep.harness.sweep.job import make_job
from kvsweep.messages.errors import UserError
from kvsweep.run_files.run_reader import StoredCell

A, B = "a" * 40, "b" * 40


@pytest.fixture
def point(tmp_path, monkeypatch) -> Iterator[Callable[[str, str], None]]:
    """`point(name, commit)` moves a branch of me/toy, in the cache of a machine without network, for a new process."""
    home = tmp_path / "models--me--toy"
    (home / "snapshots").mkdir(parents=True)
    (home / "refs").mkdir()
    for commit in (A, B):
        (home / "snapshots" / commit).symlink_to(WEIGHTS / "toy_qwen")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "is_reachable", lambda: False)

    def move(name, commit):
        (home / "refs" / name).write_text(commit)
        commit_of.cache_clear()

    yield move
    commit_of.cache_clear()


def config(**fields: str) -> ModelConfig:
    return ModelConfig(name="mine", title="Mine", path="me/toy", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("revision", [None, "main", "v1"])
def test_a_branch_that_moves_is_another_model(revision, point, capsys):
    words = ["model.path=me/toy", f"model.revision={revision or 'null'}", "policy=full", "benchmark=toy_add"]
    jobs = []
    for commit in (A, B):
        point(revision or "main", commit)
        jobs.append(make_job(compose_config(*words)))
        assert f"me/toy is taken at commit {commit}, which {revision or 'main'} names now" in capsys.readouterr().err
    assert jobs[0].cells[0].cell_id != jobs[1].cells[0].cell_id
    # A task that starts after the branch has moved, and a replay, take the commit of the plan.
    assert [job.model.revision for job in jobs] == [job.resolved["model"]["revision"] for job in jobs] == [A, B]


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_commit_alone(point, monkeypatch):
    words = ["model.path=me/toy", "policy=full", "benchmark=toy_add"]
    point("main", A)
    first = make_job(compose_config(*words))
    monkeypatch.setattr(job, "read_cells", lambda run: [(StoredCell(run / "cell"), first.cells[0].describe())])
    assert make_job(compose_config(*words)).cells == first.cells
    point("main", B)
    with pytest.raises(UserError, match=f"^main of me/toy names commit {B} now, and .* has cells of {A}"):
        make_job(compose_config(*words))
    for commit in (A, B):
        assert make_job(compose_config(*words, f"model.revision={commit}")).model.revision == commit


def test_a_commit_names_itself_and_asks_nobody(monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: pytest.fail("the hub was asked"))
    assert config(revision=A).identity()["weights"] == f"me/toy@{A}"


def test_a_branch_that_nobody_knows_is_refused(point):
    commit_of.cache_clear()
    with pytest.raises(UserError, match=r"its cache on this disk lacks it.* or the path, since no such folder is here"):
        config(revision="other").identity()
