"""The cores and the memory that control groups and SLURM grant this process."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvsweep.messages.errors import UserError

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def granted_cores() -> int:
    """Return the cores that this process may use: its affinity, limited by control groups and SLURM."""
    return max(1, min([len(os.sched_getaffinity(0)), *cgroup_cores(), *slurm_cores()]))


def cgroup_cores() -> Iterator[int]:
    """Yield the cores that each control group around this process allows; part of a core counts as one."""
    for folder, version in control_groups("cpu"):
        with suppress(OSError, ValueError):  # a group without a limit says "max" or -1
            if version == 1:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0:
                yield math.ceil(quota / period)


def slurm_cores() -> Iterator[int]:
    """Yield the processors that SLURM gave this job on its node, and inside srun, this task."""
    names = ["SLURM_CPUS_ON_NODE"]
    if "SLURM_STEP_ID" in os.environ:
        names.append("SLURM_CPUS_PER_TASK")
    for name in names:
        count = os.environ.get(name)
        if count:
            yield int(count)


def cgroup_rooms() -> Iterator[int]:
    """Yield the bytes that each control group around this process still allows."""
    for folder, version in control_groups("memory"):
        limit_file, usage_file = folder / "memory.max", folder / "memory.current"
        if version == 1:
            limit_file, usage_file = folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"
        with suppress(OSError, ValueError):  # a group without a limit says "max"
            room = int(limit_file.read_text()) - int(usage_file.read_text())
            yield room + _file_pages(folder)


def control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each control group that may limit this process, and the version of its files.

    In a container the files of the process's own group are at the mount.
    """
    with suppress(OSError):
        for line in GROUPS.read_text().splitlines():  # "4:cpu,cpuacct:/job" of version 1, "0::/job" of version 2
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = MOUNT / controller if controllers else MOUNT
            version = 1 if controllers else 2
            group = top / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    yield folder, version


def _file_pages(group: Path) -> int:
    """Return the bytes of cached files in a group's memory; the kernel drops them when memory is short."""
    with suppress(OSError, ValueError):
        sizes = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # In version 1 the total alone counts the groups below this one too, as its usage does.
        return int(sizes.get("total_inactive_file", sizes["inactive_file"]))
    return 0


def slurm_rooms() -> Iterator[int]:
    """Yield the bytes left by SLURM's memory limits of this job; a limit of 0 means all of the node's memory."""
    # SLURM_MEM_PER_CPU counts all of the job's processors on the node, also those of its other tasks.
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE") or 1)
    for name, units in (("SLURM_MEM_PER_NODE", 1), ("SLURM_MEM_PER_CPU", cores)):
        granted = _slurm_bytes(name, os.environ.get(name) or "0")
        if granted:
            _, resident_pages, *_ = Path("/proc/self/statm").read_text().split()
            yield granted * units - int(resident_pages) * os.sysconf("SC_PAGE_SIZE")


def _slurm_bytes(name: str, size: str) -> int:
    """Return the bytes of a size in srun's variables: a number of MiB, or of the unit behind it."""
    parsed = re.fullmatch(r"([0-9]+)([KMGT]?)", size.strip().upper())
    if parsed is None:
        raise UserError(f"{name}={size} is no size of memory: write MiB, or a number with K, M, G or T, or unset it.")
    number, unit = parsed.groups()
    exponent = 1 + "KMGT".index(unit or "M")
    return int(number) * 1024**exponent
