"""The memory that slots may take."""

import os

import torch

from kvsweep.harness.decode import memory
from kvsweep.harness.decode.memory import free_memory


def test_the_smallest_room_counts_and_none_is_below_nothing(monkeypatch):
    monkeypatch.setattr(memory, "cgroup_rooms", lambda: iter([123, 456]))
    assert free_memory(torch.device("cpu")) == 123
    monkeypatch.setattr(memory, "cgroup_rooms", lambda: iter([-5]))
    assert free_memory(torch.device("cpu")) == 0
    monkeypatch.setattr(memory, "cgroup_rooms", lambda: iter([]))
    assert 0 < free_memory(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
