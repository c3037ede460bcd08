"""The cores and the memory that control groups and SLURM leave."""

import os
from pathlib import Path

import pytest

from kvsweep.messages.errors import UserError
from kvsweep.processes.granted import cgroup_cores, cgroup_rooms, granted_cores, slurm_rooms


def group(folder: Path, **files: object):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def rooms(tmp_path: Path, own: str) -> list[int]:
    (tmp_path / "own").write_text(own)
    return list(cgroup_rooms(tmp_path / "own", tmp_path / "mount"))


def test_every_group_above_a_process_limits_it(tmp_path):
    mount = tmp_path / "mount"
    group(mount / "job" / "step", memory_max="max", memory_current=10)
    group(mount / "job", memory_max=1000, memory_current=400, memory_stat="anon 1\ninactive_file 50")
    group(mount, memory_max=5000, memory_current=400)
    assert rooms(tmp_path, "0::/job/step\n") == [650, 4600]
    # In a container the path is the host's, and the mount is the group.
    assert rooms(tmp_path, "0::/\n") == [4600]
    assert rooms(tmp_path, "0::/elsewhere\n") == [4600]


def test_version_1_and_no_groups(tmp_path):
    group(tmp_path / "mount/memory/job", memory_limit_in_bytes=300, memory_usage_in_bytes=100)
    (tmp_path / "mount/memory/job/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 7\n")
    assert rooms(tmp_path, "3:cpuset:/job\n4:cpu,memory:/job\n") == [207]
    assert list(cgroup_rooms(tmp_path / "missing", tmp_path)) == []


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
def test_slurm_limits_a_job_less_what_this_process_holds(environment, megabytes):
    found = list(slurm_rooms(environment))
    held = [(megabyte << 20) - room for megabyte, room in zip(megabytes, found, strict=True)]
    assert all(10 << 20 < one < 20 << 30 for one in held)


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("SLURM_MEM_PER_NODE", "4 pages", "is no size of memory: write MiB, or a number with K, M, G or T"),
        ("SLURM_MEM_PER_CPU", "-1", "is no size of memory"),
    ],
)
def test_a_limit_of_slurm_that_cannot_be_read_is_named(name, value, way_out):
    with pytest.raises(UserError) as refused:
        list(slurm_rooms({name: value}))
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
def test_a_group_limits_the_time_of_cores(files, own, cores, tmp_path):
    group(tmp_path / "mount" / ("job" if own.startswith("0") else "cpu/job"), **files)
    (tmp_path / "own").write_text(own)
    assert list(cgroup_cores(tmp_path / "own", tmp_path / "mount")) == cores


def test_the_fewest_cores_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert granted_cores({}) <= 6
    assert granted_cores({"SLURM_CPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "9"}) == 1
    # A batch script of several tasks may use all of their processors; what srun starts may use its own.
    job = {"SLURM_CPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "1"}
    assert granted_cores({**job, "SLURM_STEP_ID": "0"}) == 1
    monkeypatch.setattr("kvsweep.processes.granted.cgroup_cores", lambda: iter([3]))
    assert (granted_cores({}), granted_cores(job), granted_cores({"SLURM_CPUS_ON_NODE": "2"})) == (3, 3, 2)
