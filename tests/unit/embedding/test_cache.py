"""Older versions' files go, and nothing else does."""

from __future__ import annotations

import fcntl

import pytest

from extproc.embedding.cache import in_use, remove_older

SOURCE = "0db566fd0af8"
NEWEST = f"static-m3-{SOURCE}-v3.table"


@pytest.fixture
def folder(tmp_path):
    def fill(*names):
        for name in names:
            (tmp_path / name).write_bytes(b"x" * 2_000_000)
        return tmp_path

    return fill


def names(path):
    return {each.name for each in path.iterdir()}


def swept(path):
    said = []
    remove_older(path / NEWEST, said.append)
    return said


def test_lower_versions_go_with_seal_and_lock_and_one_line_says_so(folder):
    kept = {NEWEST, f"static-m3-{SOURCE}-v3.json", f"static-m3-{SOURCE}-v3.lock"}
    old = [f"static-m3-{SOURCE}-v{n}.{kind}" for n in (1, 2) for kind in ("table", "json", "lock")]
    path = folder(*kept, *old, "static-m3-aaaaaaaaaaaa-v1.table")
    assert swept(path) == [
        f"removed 3 files that an older version had built in {path} (6 MB)",
    ]
    assert names(path) == kept
    assert swept(path) == []


@pytest.mark.parametrize(
    "name",
    [
        f"static-m3-{SOURCE}-v4.table",
        f"static-m3-{SOURCE}-v30.table",
        f"static-m3-{SOURCE}-v1.onnx",
        f"static-m3-{SOURCE}-int8-v1.table",
        f"use-m3-{SOURCE}-v1.table",
        f"static-m3-{SOURCE}-v1.table.bak",
        f".static-m3-{SOURCE}-v1.table",
        f"static-m3-{SOURCE}x-v1.table",
        f"my-static-m3-{SOURCE}-v1.table",
        "static-m3-v1.table",
    ],
)
def test_what_is_no_older_version_of_it_stays(folder, name):
    path = folder(NEWEST, name)
    assert swept(path) == []
    assert names(path) == {NEWEST, name}


def test_what_is_in_use_or_being_built_stays_until_it_is_not(folder):
    old = f"static-m3-{SOURCE}-v2.table"
    path = folder(NEWEST, old)
    with in_use(path / old):
        assert swept(path) == []
        assert old in names(path)
    lock = path / f"static-m3-{SOURCE}-v2.lock"
    with lock.open("wb") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        assert swept(path) == []
        assert old in names(path)
    assert len(swept(path)) == 1
    assert names(path) == {NEWEST}


def test_a_folder_that_cannot_be_changed_is_no_error(folder):
    path = folder(NEWEST)
    (path / f"static-m3-{SOURCE}-v2.table").mkdir()
    assert swept(path) == []
    remove_older(path / "nowhere" / NEWEST, print)
