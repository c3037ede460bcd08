"""The cores and the memory that control groups and SLURM leave."""

import os
from pathlib import Path

import pytest

from kvsweep.messages.errors import UserError
from kvsweep.processes import granted


def group(folder: Path, **files: object):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The file that names this process's groups, and the folder of all groups."""
    monkeypatch.setattr(granted, "GROUPS", tmp_path / "own")
    monkeypatch.setattr(granted, "MOUNT", tmp_path / "mount")
    return granted.GROUPS, granted.MOUNT


def rooms(own: str) -> list[int]:
    granted.GROUPS.write_text(own)
    return list(granted.cgroup_rooms())


def test_every_group_above_a_process_limits_it(places):
    _, mount = places
    group(mount / "job" / "step", memory_max="max", memory_current=10)
    group(mount / "job", memory_max=1000, memory_current=400, memory_stat="anon 1\ninactive_file 50")
    group(mount, memory_max=5000, memory_current=400)
    assert rooms("0::/job/step\n") == [650, 4600]
    # In a container the path is the host's, and the mount is the group.
    assert rooms("0::/\n") == [4600]
    assert rooms("0::/elsewhere\n") == [4600]


def test_version_1_and_no_groups(places):
    _, mount = places
    assert list(granted.cgroup_rooms()) == []
    group(mount / "memory/job", memory_limit_in_bytes=300, memory_usage_in_bytes=100)
    (mount / "memory/job/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 7\n")
    assert rooms("3:cpuset:/job\n4:cpu,memory:/job\n") == [207]


@pytest.mark.parametrize(
    ("environment", "megabytes"),
    [
        ({"SLURM_MEM_PER_NODE": "4096"}, [4096]),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "3"}, [3000]),
        ({"SLURM_MEM_PER_NODE": "0"}, []),
        ({"SLURM_MEM_PER_NODE": ""}, []),
        ({"SLURM_MEM_PER_NODE": "4G"}, [4096]),
        ({"SLURM_MEM_PER_NODE": "1t"}, [1 << 20]),
        ({"SLURM_MEM_PER_NODE": "2097152K"}, [2048]),
        ({"SLURM_MEM_PER_CPU": "2g", "SLURM_CPUS_ON_NODE": "2"}, [4096]),
        ({}, []),
    ],
)
def test_slurm_limits_a_job_less_what_this_process_holds(environment, megabytes, monkeypatch):
    monkeypatch.setattr(os, "environ", environment)
    found = list(granted.slurm_rooms())
    held = [(megabyte << 20) - room for megabyte, room in zip(megabytes, found, strict=True)]
    assert all(10 << 20 < one < 20 << 30 for one in held)


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("SLURM_MEM_PER_NODE", "4 pages", "is no size of memory: write MiB, or a number with K, M, G or T"),
        ("SLURM_MEM_PER_CPU", "-1", "is no size of memory"),
    ],
)
def test_a_limit_of_slurm_that_cannot_be_read_is_named(name, value, way_out, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        list(granted.slurm_rooms())
    assert f"{name}={value} {way_out}" in str(refused.value)


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu_max": "150000 100000"}, "0::/job\n", [2]),
        ({"cpu_max": "max 100000"}, "0::/job\n", []),
        ({"cpu_max": "1000 100000"}, "0::/\n", []),
        ({"cpu_cfs_quota_us": 300_000, "cpu_cfs_period_us": 100_000}, "5:cpu,cpuacct:/job\n", [3]),
        ({"cpu_cfs_quota_us": -1, "cpu_cfs_period_us": 100_000}, "5:cpu,cpuacct:/job\n", []),
        ({"cpu_max": "150000 100000"}, "5:cpuset:/job\n", []),
    ],
)
def test_a_group_limits_the_time_of_cores(files, own, cores, places):
    groups, mount = places
    group(mount / ("job" if own.startswith("0") else "cpu/job"), **files)
    groups.write_text(own)
    assert list(granted.cgroup_cores()) == cores


def test_the_fewest_cores_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))

    def cores(environment: dict[str, str]) -> int:
        monkeypatch.setattr(os, "environ", environment)
        return granted.granted_cores()

    assert cores({}) <= 6
    assert cores({"SLURM_CPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "9"}) == 1
    # A batch script of several tasks may use all of their processors; what srun starts may use its own.
    job = {"SLURM_CPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "1"}
    assert cores({**job, "SLURM_STEP_ID": "0"}) == 1
    monkeypatch.setattr(granted, "cgroup_cores", lambda: iter([3]))
    assert (cores({}), cores(job), cores({"SLURM_CPUS_ON_NODE": "2"})) == (3, 3, 2)
