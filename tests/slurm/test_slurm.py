"""Sweeps under a real SLURM: one array, requeues, preemption, kills, time limits, and a task that always fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvsweep.run_files.row_types import COMPLETIONS_FILE, shard_files
from kvsweep.run_files.task_status import TaskStatus

ROOT = Path(__file__).parents[2]
CLUSTER = Path(__file__).with_name("cluster.sh")
SWEEP = [
    "model=toy_qwen",
    "benchmark=toy_chain",
    "benchmark.limit=60",
    "grid.policy=[full,dynts]",
    "grid.keep_ratio=[0.2,0.4]",
    "policy.budget=96",
    "policy.local_window=32",
    "policy.question=on_top",
    "decoding.max_new_tokens=400",
    "slots=4",
]
SMALL = ["benchmark.limit=6", "launcher.shards=2", "launcher.parallel=2"]
SLURM = ["launcher=slurm", "launcher.shards=4", "launcher.gpus=0", "launcher.cpus=1", "launcher.parallel=4"]

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="no SLURM"),
]
takes_minutes = pytest.mark.slow  # of SLURM's own waiting or of processor time; CI leaves such cases out


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A running SLURM of four processors; yields the environment that its programs need."""
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run([CLUSTER, "up", folder, "4"], check=True, timeout=300)
    yield {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([CLUSTER, "down", folder], check=True, timeout=300)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, list[bytes]]:
    """The sweep's completions, uninterrupted, in one process."""
    return undisturbed(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def small_reference(tmp_path_factory) -> dict[str, list[bytes]]:
    """The same for the first problems of `SMALL`."""
    return undisturbed(tmp_path_factory.mktemp("small_reference"), *SMALL[:1])


def undisturbed(results: Path, *more: str) -> dict[str, list[bytes]]:
    kvsweep(*SWEEP, *more, f"results_dir={results}", environment=dict(os.environ, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}"))
    return completions(results / "default")


def kvsweep(*arguments: str, environment: dict[str, str], code: int = 0) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "kvsweep.cli", *arguments],
        env=environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=3000,
        check=False,
    )
    assert ended.returncode == code, ended.stderr[-3000:]
    return ended.stdout


def submit(cluster: dict[str, str], results: Path, *more: str, sweep: list[str] = SWEEP) -> str:
    """Submit the sweep; returns the array's job number."""
    out = kvsweep(*sweep, *SLURM, *more, f"results_dir={results}", environment=cluster)
    return out.split(" as job ")[1].split()[0]


def completions(run: Path) -> dict[str, list[bytes]]:
    """Every cell's lines, from whichever shards, sorted."""
    cells = [path.parent for path in run.glob("*/cell.yaml")]
    return {
        cell.name: sorted(
            line for path in shard_files(cell, COMPLETIONS_FILE).values() for line in path.read_bytes().splitlines()
        )
        for cell in cells
    }


def stored(run: Path) -> int:
    return sum(len(lines) for lines in completions(run).values())


def decoding_passes(run: Path) -> int:
    """How often all shards together began to work on the cell that was begun most often."""
    return max(
        sum(len(json.loads(path.read_text())["decoding_passes"]) for path in cell.parent.glob("provenance*.json"))
        for cell in run.glob("*/cell.yaml")
    )


def slurm(cluster: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=cluster, text=True, capture_output=True, check=True, timeout=300).stdout


def wait(condition: Callable[[], Any], what: str, seconds: float = 240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds} s"
        time.sleep(0.3)


def wait_until_empty(cluster: dict[str, str]):
    wait(lambda: not slurm(cluster, "squeue", "--noheader").strip(), "an empty queue")


def status(run: Path, cluster: dict[str, str]) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "kvsweep.cli", "status", str(run), "--json"],
        env=cluster,
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def running_tasks(run: Path) -> list[TaskStatus]:
    tasks = [(path, TaskStatus.read(path)) for path in (run / "status").glob("*.json")]
    return [task for path, task in tasks if task.seen(path) == "running"]


def stop_two_tasks(run: Path) -> set[int]:
    """Stop two processes each as soon as it works: a quick machine is done with the first before the second begins."""
    pids = set[int]()

    def are_stopped():
        for pid in {task.pid for task in running_tasks(run)} - pids:
            os.kill(pid, signal.SIGSTOP)
            pids.add(pid)
        return len(pids) == 2

    wait(are_stopped, "two busy tasks")
    return pids


@takes_minutes
def test_an_array_that_everything_happens_to_ends_complete(cluster, reference, tmp_path):
    run = tmp_path / "default"
    job = submit(cluster, tmp_path)
    wait(lambda: (run / "status").exists() and len(running_tasks(run)) == 4 and stored(run) > 3, "four busy tasks")
    assert {task.scheduler_job for task in running_tasks(run)} == {f"{job}_{i}" for i in range(4)}

    slurm(cluster, "scontrol", "requeue", f"{job}_0")
    requeued = look(lambda told: "queued as job" in told, run, cluster)
    killed = next(task for task in running_tasks(run) if task.scheduler_job == f"{job}_1")
    os.kill(killed.pid, signal.SIGKILL)
    dead = look(lambda told: f"job {job}_1" in told, run, cluster)
    slurm(cluster, "sbatch", "--partition=urgent", "--ntasks=4", "--output=/dev/null", "--wrap=sleep 5")
    wait_until_empty(cluster)

    told = status(run, cluster)
    if told["states"] != {"done": 3}:  # the killed one is not requeued by anybody
        [failed] = [task for task in told["tasks"] if task["state"] == "stopped"]
        assert failed["scheduler_job"] == f"{job}_1"
        assert told["retry"]
        submit(cluster, tmp_path)
        wait_until_empty(cluster)
    assert status(run, cluster)["states"] == {"done": 3}
    assert completions(run) == reference
    # How many the urgent job stops depends on who is at work then; these two began again for sure.
    assert decoding_passes(run) >= 4 + 2, "one requeued, one killed"
    record("array of 4 shards, `scontrol requeue` of one task", requeued, equal=True)
    record("kill -9 of one task's process, as by the kernel out of memory", dead, equal=True)


def test_a_task_runs_where_the_site_lets_jobs_inherit_nothing(cluster, tmp_path):
    # The shell has variables of a job that is over.
    shell = {"SLURM_JOB_ID": "99999", "SLURM_NTASKS": "4", "SLURM_GPUS": "7", "SLURM_CONSTRAINT": "none_such"}
    site = {**cluster, **shell, "SBATCH_EXPORT": "NONE", "SBATCH_WAIT": "1", "SQUEUE_STATES": "COMPLETING"}
    # The checkout, and this cluster's own place; on a real one both are installed.
    setup = "launcher.setup=[{}]".format(",".join(f'"export {n}={cluster[n]}"' for n in ("PYTHONPATH", "SLURM_CONF")))
    words = ["model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=1", "decoding.max_new_tokens=2", "policy=full"]
    job = submit(site, tmp_path, "launcher.shards=1", setup, sweep=words)
    wait_until_empty(cluster)
    run = tmp_path / "default"
    assert stored(run) == 1, _logs(run, job)
    assert status(run, cluster)["states"] == {"done": 1}


def test_a_whole_node_starts_one_process_of_a_task(cluster, tmp_path):
    site = 'launcher.setup=["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]'
    words = ["model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=1", "decoding.max_new_tokens=2", "policy=full"]
    job = submit(cluster, tmp_path, "launcher.shards=1", "launcher.partition=whole", site, sweep=words)
    wait_until_empty(cluster)
    run = tmp_path / "default"
    assert stored(run) == 1, _logs(run, job)
    assert "Traceback" not in _logs(run, job)
    assert len(list((run / "logs").glob(f"{job}_*_log.out"))) == 1


@takes_minutes
def test_a_time_limit_requeues_the_task(cluster, small_reference, tmp_path):
    """The limit is SLURM's own coarse minute; the signal before it makes submitit queue the task again.

    On a loaded machine, where a task needs most of a minute to start, KVSWEEP_SLURM_MINUTES sets a longer limit.
    """
    run = tmp_path / "default"
    minutes = int(os.environ.get("KVSWEEP_SLURM_MINUTES", "1"))
    limit = (f"launcher.timeout_min={minutes}", "launcher.signal_delay_s=50")
    job = submit(cluster, tmp_path, *SMALL, "launcher.shards=1", *limit)
    wait(lambda: (run / "status").exists() and running_tasks(run) and stored(run) > 3, "a busy task")
    # A quick machine would be done before the signal: the task waits for it.
    [task] = running_tasks(run)
    os.kill(task.pid, signal.SIGSTOP)
    wait(lambda: _pending(task.pid, signal.SIGUSR2), "the signal before the limit")
    with suppress(ProcessLookupError):
        os.kill(task.pid, signal.SIGCONT)
    wait(lambda: "requeued" in _logs(run, job).lower(), "the requeue")
    again = look(lambda told: "queued as job" in told, run, cluster)
    wait_until_empty(cluster)
    if status(run, cluster)["states"] != {"done": 3}:
        kvsweep(*SWEEP, *SMALL[:1], f"results_dir={tmp_path}", environment=cluster)
    record("time limit; submitit queues the task again", again, completions(run) == small_reference)


def _pending(pid: int, number: signal.Signals) -> bool:
    """True if the stopped process has been sent the signal, or is gone because SLURM itself woke it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return True
    waiting = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
    return bool(waiting & 1 << (number - 1))


def _logs(run: Path, job: str) -> str:
    return "".join(path.read_text(errors="replace") for path in (run / "logs").glob(f"{job}_*_log.*"))


@takes_minutes
def test_a_task_that_always_fails_is_reported_and_the_others_are_kept(cluster, small_reference, tmp_path):
    run = tmp_path / "default"
    [spoiled, *_] = small_reference
    # What one shard wants to write is a folder: that task fails, whoever starts it and however often.
    (run / spoiled / "provenance-2of2.json").mkdir(parents=True)
    job = submit(cluster, tmp_path, *SMALL)
    wait_until_empty(cluster)
    told = status(run, cluster)
    states = {task["scheduler_job"] or task["task"]: task["state"] for task in told["tasks"]}
    assert sorted(states.values()) == ["done", "failed"], f"job {job}: {states}"
    [failed] = [task for task in told["tasks"] if task["state"] == "failed"]
    assert failed["shard"] == "2/2"
    assert "provenance-2of2.json" in failed["error"]
    assert stored(run) == sum(len(lines) for lines in small_reference.values()) // 2
    (run / spoiled / "provenance-2of2.json").rmdir()
    kvsweep(*SWEEP, *SMALL[:1], "shard=2/2", f"results_dir={tmp_path}", environment=cluster)
    assert completions(run) == small_reference


@takes_minutes
def test_a_sequential_sweep_has_an_array_for_each_round(cluster, tmp_path):
    words = [word for word in SWEEP if not word.startswith("policy.budget")]
    sweep = [*words, "benchmark.limit=12", "grid.keep_ratio=[0.2]", "grid.budget=[96,256]", "draws=4", "until=decided"]
    kvsweep(
        *sweep, f"results_dir={tmp_path / 'calm'}", environment=dict(os.environ, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    )
    expected = completions(tmp_path / "calm/default")
    assert {len(rows) for rows in expected.values()} == {2 * 12, 4 * 12}, "one cell at least is decided early"
    run = tmp_path / "default"
    first = submit(cluster, tmp_path, "launcher.shards=2", sweep=sweep)
    wait(lambda: (run / "status").exists() and running_tasks(run), "a busy task")
    arrays = set(slurm(cluster, "squeue", "--noheader", "--format=%F").split())
    assert len(arrays - {first}) == 1, "the array of the second round waits"
    slurm(cluster, "scontrol", "requeue", f"{first}_0")
    wait_until_empty(cluster)
    assert completions(run) == expected
    assert status(run, cluster)["states"] == {"done": 3}


@takes_minutes
def test_a_replay_of_a_finished_run_is_the_replay_of_one_process(cluster, tmp_path):
    run, calm = tmp_path / "default", tmp_path / "calm"
    undisturbed(tmp_path, *SMALL[:1])
    shutil.copytree(run, calm)
    launcher = [*SLURM, "launcher.shards=2", "launcher.parallel=2"]
    submitted = kvsweep("replay", str(run), *launcher, environment=cluster)
    assert f"progress: kvsweep status {run} --watch" in submitted
    kvsweep("replay", str(calm), environment=cluster)
    wait_until_empty(cluster)
    told = status(run, cluster)
    assert (told["replayed"], told["to_replay"]) == (18, 18), "3 cells, 6 texts"
    assert {path.name for path in run.glob("*/replay*.jsonl")} == {"replay-1of2.jsonl", "replay-2of2.jsonl"}
    found, expected = replayed(run), replayed(calm)
    assert found.keys() == expected.keys()
    assert sum(row["kl_mean"] > 0 for row in expected.values()) > 6
    for key, row in expected.items():
        assert found[key]["evictions"] == row["evictions"]
        for name in ("kl_mean", "change", "top1"):  # which texts lie side by side changes the last bits
            assert found[key][name] == pytest.approx(row[name], rel=1e-3, abs=1e-5)
    wrote = {path: path.read_bytes() for path in run.glob("*/replay*.jsonl")}
    kvsweep("replay", str(run), *launcher, environment=cluster)
    wait_until_empty(cluster)
    assert {path: path.read_bytes() for path in wrote} == wrote, "nothing is left to replay"


def replayed(run: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = [
        (path.parent.name, json.loads(line)) for path in run.glob("*/replay*.jsonl") for line in path.open().readlines()
    ]
    return {(cell, row["problem_id"]): row for cell, row in lines}


def words(run: Path, cluster: dict[str, str]) -> str:
    """What kvsweep status tells a user, in one line."""
    command = [sys.executable, "-m", "kvsweep.cli", "status", str(run)]
    ended = subprocess.run(command, env=cluster, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    return " ".join(ended.stdout.partition("\n\n")[2].split())


def look(enough: Callable[[str], bool], run: Path, cluster: dict[str, str], seconds: float = 120) -> str:
    """What the status tells as soon as it is enough, or at the end of the time; for the table alone."""
    end = time.monotonic() + seconds
    while not enough(told := words(run, cluster)) and time.monotonic() < end:
        time.sleep(0.2)
    return told


def record(case: str, told: str, equal: bool | None):
    """Add a line to the table of results/published/slurm_cases.md where KVSWEEP_SLURM_TABLE names a file.

    `equal` says if the rows are those of the undisturbed run; None where the case makes no rows.
    """
    assert equal is not False, case
    if table := os.environ.get("KVSWEEP_SLURM_TABLE"):
        plain = re.sub(
            r"\S*-[0-9a-f]{8}\b", "TASK", re.sub(r"Not graded yet: .*?default|Try again with.*", "", told)
        ).replace("|", "/")
        with Path(table).open("a") as file:
            file.write(f"| {case} | {plain.strip()} | {'equal' if equal else 'none made'} |\n")


def node(cluster: dict[str, str], state: str):
    name, now, *_ = slurm(cluster, "sinfo", "--noheader", "--Node", "--format=%N %T").split()
    if state == "resume" and now in ("idle", "mixed", "allocated"):
        return  # a node that was down comes back by itself as soon as its daemon answers
    reason = [] if state == "resume" else ["reason=test"]
    command = ["scontrol", "update", f"nodename={name}", f"state={state}", *reason]
    # A node that has just come back by itself refuses to resume.
    subprocess.run(command, env=cluster, capture_output=True, check=state != "resume", timeout=300)


def test_each_task_of_a_sweep_sees_the_gpu_that_slurm_gives_it(cluster, small_reference, tmp_path):
    run = tmp_path / "default"
    submit(cluster, tmp_path, *SMALL, "launcher.gpus=1", "model.device=cpu")
    wait(lambda: (run / "status").exists() and len(running_tasks(run)) == 2, "two busy tasks")
    environments = [Path(f"/proc/{task.pid}/environ").read_text().split("\0") for task in running_tasks(run)]
    seen = [line for environment in environments for line in environment if line.startswith("CUDA_VISIBLE_DEVICES=")]
    assert sorted(seen) == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"]
    wait_until_empty(cluster)
    assert completions(run) == small_reference


def test_a_suspended_task_goes_on_and_no_grade_times_out(cluster, small_reference, tmp_path):
    run = tmp_path / "default"
    job = submit(cluster, tmp_path, *SMALL)
    wait(lambda: (run / "status").exists() and len(running_tasks(run)) == 2, "two busy tasks")
    slurm(cluster, "scontrol", "suspend", f"{job}_0")
    wait(lambda: f"queued as job {job}, suspended in SLURM" in words(run, cluster), "the suspended task")
    told = words(run, cluster)
    time.sleep(8)  # longer than the deadline of a grade
    slurm(cluster, "scontrol", "resume", f"{job}_0")
    wait_until_empty(cluster)
    assert status(run, cluster)["states"] == {"done": 3}
    graded = [json.loads(line) for path in run.glob("*/grades*.jsonl") for line in path.read_text().splitlines()]
    assert len(graded) == 3 * 6
    assert not [row for row in graded if row["outcome"] == "grader_timeout"]
    record("`scontrol suspend` of one task, `resume` later", told, completions(run) == small_reference)


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no memory groups of this user")
def test_a_task_that_takes_more_memory_than_it_asked_for(cluster, small_reference, tmp_path):
    run = tmp_path / "default"
    job = submit(cluster, tmp_path, *SMALL, "launcher.shards=1", "launcher.memory_gb=0.25")
    wait_until_empty(cluster)
    told = words(run, cluster)
    assert f"job {job} left SLURM's queue while it ran" in told
    assert "out of time or memory" in told
    assert "oom-kill" in _logs(run, job) or "Out Of Memory" in _logs(run, job)
    submit(cluster, tmp_path, *SMALL, "launcher.shards=1", "launcher.memory_gb=2.5")
    wait_until_empty(cluster)
    record("memory above `launcher.memory_gb`, cgroup kill", told, completions(run) == small_reference)


def test_a_submission_that_fails_leaves_nothing_queued(cluster, tmp_path):
    arguments = [*SWEEP, *SLURM, "launcher.partition=nowhere", f"results_dir={tmp_path}"]
    command = [sys.executable, "-m", "kvsweep.cli", *arguments]
    ended = subprocess.run(command, env=cluster, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "launcher=slurm cannot submit" in ended.stderr
    assert "partition" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list((tmp_path / "default/status").glob("*"))
    record("wrong partition (`launcher.partition=nowhere`)", f"at submission: {ended.stderr}", equal=None)


def test_a_submitting_host_that_dies_is_told(cluster, tmp_path):
    for name, text in {"sbatch": "kill -9 $PPID", "srun": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**cluster, "PATH": f"{tmp_path}:{cluster['PATH']}"}
    kvsweep(*SWEEP, *SLURM, f"results_dir={tmp_path}", environment=environment, code=-9)
    told = words(tmp_path / "default", cluster)
    assert "stopped" in told
    assert "the command that queued this task ended before the task began" in told
    record("submission host gone before sbatch (kill -9 of the submitting process)", told, equal=None)


@takes_minutes
def test_waiting_cancelled_and_second_submissions(cluster, small_reference, tmp_path):
    run = tmp_path / "default"
    node(cluster, "drain")
    try:
        first = submit(cluster, tmp_path, *SMALL)
        wait(lambda: "the nodes that it needs are down" in words(run, cluster), "a reason")
        waiting = words(run, cluster)
        assert f"2 tasks: queued as job {first}, pending in SLURM" in waiting
        slurm(cluster, "scancel", f"{first}_1")
        wait(lambda: f"job {first}_1 left SLURM's queue before it began" in words(run, cluster), "the cancelled task")
        cancelled = words(run, cluster)
        assert "Go on with" in cancelled
        out = kvsweep(*SWEEP, *SLURM, *SMALL, f"results_dir={tmp_path}", environment=cluster)
        assert f"note: job {first} works on the same cells" in out
        second = out.split(" as job ")[1].split()[0]
        wait(lambda: "the job that works on the same cells goes first" in words(run, cluster), "the dependency")
        behind = words(run, cluster)
    finally:
        node(cluster, "resume")
    wait_until_empty(cluster)
    equal = completions(run) == small_reference
    assert status(run, cluster)["states"] == {"done": 3}, f"job {second}"
    record("node drained, array of 2 shards waits", waiting, equal)
    record("scancel of one task that waits", cancelled, equal)
    record(f"second submission beside the array (which says: {out.splitlines()[0]})", behind, equal)


@takes_minutes
def test_a_task_cancelled_at_work(cluster, small_reference, tmp_path):
    run = tmp_path / "default"
    first = submit(cluster, tmp_path, *SMALL)
    pids = stop_two_tasks(run)
    slurm(cluster, "scancel", f"{first}_1")

    def is_cancelled():
        for pid in pids:  # scancel lets a stopped process go on, and a quick one is done before it is killed
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return f"job {first}_1 left SLURM's queue while it ran" in words(run, cluster)

    wait(is_cancelled, "the cancelled task")
    cancelled = words(run, cluster)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_until_empty(cluster)
    submit(cluster, tmp_path, *SMALL)
    wait_until_empty(cluster)
    record("scancel of one task at work", cancelled, completions(run) == small_reference)


@takes_minutes
def test_a_node_that_goes_down_at_work(cluster, small_reference, tmp_path):
    run = tmp_path / "default"
    job = submit(cluster, tmp_path, *SMALL)
    pids = stop_two_tasks(run)
    try:
        node(cluster, "down")
        wait(lambda: f"queued as job {job}, pending in SLURM" in words(run, cluster), "the requeued tasks")
        down = words(run, cluster)
        for pid in pids:  # the processes of a node that is down are dead
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        node(cluster, "resume")

    def is_over():
        # The node drains itself, and SLURM holds the task, if it comes before the last remains of the old one are gone.
        node(cluster, "resume")
        if "scontrol release lets it go" in words(run, cluster):
            subprocess.run(["scontrol", "release", job], env=cluster, capture_output=True, check=False, timeout=300)
        return not slurm(cluster, "squeue", "--noheader").strip()

    wait(is_over, "an empty queue", 480)
    if status(run, cluster)["states"] != {"done": 3}:
        submit(cluster, tmp_path, *SMALL)
        wait_until_empty(cluster)
    record("node down while two tasks work; SLURM queues them again", down, completions(run) == small_reference)
