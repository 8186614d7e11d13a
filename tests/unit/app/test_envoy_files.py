"""Files for Envoy are whole and private, and keys are followed without ever taking bad ones."""

import json
import stat

import pytest

from extproc.app.envoy_files import KeyKeeper, install, key_files, replace
from extproc.config import parse

KEY = "sk-0123456789abcdef"


@pytest.fixture
def config(tmp_path):
    (tmp_path / "keys").write_text(f"team-a {KEY}\n")
    (tmp_path / "own").write_text("sk-own\n")
    text = (
        '[upstream.a]\nbase_url = "http://127.0.0.1:1"\nmodel = "m"\n'
        f'api_key_file = "{tmp_path}/own"\n'
        f'[server.auth]\nkeys_file = "{tmp_path}/keys"\n'
        f'[extproc]\nsocket = "{tmp_path}/run/x.sock"\n'
    )
    (tmp_path / "run").mkdir()
    return parse(text, file="x", environ=None)


def published(tmp_path):
    text = (tmp_path / "run" / "client-keys.json").read_text()
    (resource,) = json.loads(text)["resources"]
    return [each["key"] for each in resource["typed_config"]["credentials"]]


def published_own(tmp_path):
    """The upstream's key."""
    (resource,) = json.loads((tmp_path / "run" / "key.a.json").read_text())["resources"]
    return resource["generic_secret"]["secret"]["inline_string"]


def test_what_is_written_is_the_owners_alone(tmp_path, config):
    bootstrap = install(config)
    assert bootstrap == tmp_path / "run" / "envoy.yaml"
    files = list((tmp_path / "run").iterdir())
    assert {each.name for each in files} == {"envoy.yaml", "client-keys.json", "key.a.json"}
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in files)
    assert KEY not in bootstrap.read_text()
    assert "sk-own" not in bootstrap.read_text()
    assert published(tmp_path) == [KEY]
    assert published_own(tmp_path) == "sk-own"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    replace(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        replace(tmp_path / "f", "\ud800")
    assert [each.name for each in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "old"


@pytest.fixture
def keeper(tmp_path, config):
    install(config)
    told = []
    keeper = KeyKeeper(key_files(config)[0], told.append)
    keeper.look()
    keeper.look()
    assert told == []  # what install wrote is in force already
    return keeper, told


def test_a_change_is_taken_once_it_has_settled(tmp_path, keeper):
    keeper, told = keeper
    (tmp_path / "keys").write_text(f"team-a {KEY}-new\n")
    keeper.look()
    assert published(tmp_path) == [KEY]
    keeper.look()
    assert published(tmp_path) == [f"{KEY}-new"]
    keeper.look()
    assert told == [True]


@pytest.mark.parametrize("text", ["", "team-a short\n", "a short\nb short\n", None])
def test_a_bad_file_changes_nothing_is_told_once_and_shows_no_key(tmp_path, keeper, text, caplog):
    keeper, told = keeper
    if text is None:
        (tmp_path / "keys").unlink()
    else:
        (tmp_path / "keys").write_text(text)
    for _ in range(4):
        keeper.look()
    assert published(tmp_path) == [KEY]
    assert told == [False]
    (record,) = caplog.records
    assert "the keys from before stay in force" in record.getMessage()
    assert "short" not in record.getMessage()
    (tmp_path / "keys").write_text(f"team-a {KEY}-mended\n")
    keeper.look()
    keeper.look()
    assert published(tmp_path) == [f"{KEY}-mended"]
    assert told == [False, True]


@pytest.mark.parametrize("text", ["team-a short\n", None])
def test_going_back_to_the_keys_in_force_is_told_as_a_fault_mended(tmp_path, keeper, text):
    keeper, told = keeper
    keys = tmp_path / "keys"
    good = keys.read_text()
    keys.unlink() if text is None else keys.write_text(text)
    keeper.look()
    keeper.look()
    keys.write_text(good)
    for _ in range(4):
        keeper.look()
    assert told == [False, True]
    assert published(tmp_path) == [KEY]


def test_a_keeper_that_starts_behind_a_change_takes_it(tmp_path, config):
    """The sidecar was dead while the file changed."""
    install(config)
    (tmp_path / "keys").write_text(f"team-a {KEY}-new\n")
    keeper = KeyKeeper(key_files(config)[0])
    keeper.look()
    keeper.look()
    assert published(tmp_path) == [f"{KEY}-new"]


@pytest.mark.parametrize("text", ["", " \n\t\n", "hunter2\nx", "hunter2\x01", "hunter2 x", None])
def test_an_upstreams_last_good_key_outlives_a_bad_file(tmp_path, config, text, caplog):
    install(config)
    (keeper,) = (KeyKeeper(file) for file in key_files(config) if not file.is_clients)
    path = tmp_path / "own"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    for _ in range(4):
        keeper.look()
    assert published_own(tmp_path) == "sk-own"
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path}: ")
    assert "the keys from before stay in force" in record.getMessage()
    assert "hunter2" not in record.getMessage()
    path.write_text("  sk-mended \r\n")
    keeper.look()
    keeper.look()
    assert published_own(tmp_path) == "sk-mended"
