"""Workers are counted by what the process may really use."""

from __future__ import annotations

import os

import pytest

from extproc.embedding.cores import default_workers


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of `cores`, with cgroups of `quotas` ({path: text of cpu.max})."""

    def build(cores, own=None, quotas=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        cgroup = tmp_path / "cgroup"
        if own is not None:
            cgroup.write_text(f"1:cpu:/legacy\n0::{own}\n")
        for path, text in (quotas or {}).items():
            group = tmp_path / "fs" / path
            group.mkdir(parents=True, exist_ok=True)
            (group / "cpu.max").write_text(text)
        return default_workers(cgroup=cgroup, hierarchy=tmp_path / "fs")

    return build


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (3, 2), (32, 31)])
def test_one_core_is_left_for_envoy_and_the_loop(machine, cores, workers):
    assert machine(cores) == workers


def test_quota_of_the_container_counts(machine):
    assert machine(32, "/", {"": "400000 100000\n"}) == 3


def test_fraction_of_a_core_is_no_core(machine):
    assert machine(32, "/", {"": "250000 100000"}) == 1


def test_quota_below_one_core_still_has_a_worker(machine):
    assert machine(32, "/", {"": "50000 100000"}) == 1


def test_tightest_quota_on_the_way_to_the_root_counts(machine):
    quotas = {"pods/pod1/main": "max 100000", "pods/pod1": "300000 100000", "pods": "max 100000"}
    assert machine(32, "/pods/pod1/main", quotas) == 2


def test_quota_above_the_affinity_is_no_gain(machine):
    assert machine(4, "/", {"": "800000 100000"}) == 3


@pytest.mark.parametrize("text", ["", "garbage", "max 100000"])
def test_unreadable_or_absent_quota_is_none(machine, text):
    assert machine(4, "/", {"": text}) == 3
