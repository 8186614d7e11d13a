"""What may stand in the way of the sidecar's socket; no socket is opened here."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.serving.server import SocketBusyError, _remove_stale


def test_nothing_in_the_way_is_fine(tmp_path: Path) -> None:
    _remove_stale(tmp_path / "extproc.sock")


def test_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    with pytest.raises(SocketBusyError, match="not a socket"):
        _remove_stale(file)
    assert file.read_text() == "data"
