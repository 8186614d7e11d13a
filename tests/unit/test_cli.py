"""Arguments that contradict a configuration; each command is tested where it lives."""

import pytest

from extproc import cli

FOREIGN = """
[extproc]
listen = "127.0.0.1:9002"
[upstream.x]
base_url = "http://x.example"
model = "m"
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["render"], cli.EXIT_USAGE),
        (["up", "--config"], cli.EXIT_FAILED),
        (["serve", "--socket", "/tmp/x.sock", "--config"], cli.EXIT_USAGE),
    ],
)
def test_what_needs_our_own_envoy_says_so_where_another_is_there(tmp_path, capsys, arguments, code):
    path = tmp_path / "pointsman.toml"
    path.write_text(FOREIGN)
    assert cli.main([*arguments, str(path)]) == code
    assert "[extproc] listen" in capsys.readouterr().err


def test_check_needs_no_keys_and_says_which_are_not_there(tmp_path, capsys, monkeypatch):
    path = tmp_path / "c.toml"
    path.write_text(
        '[upstream.a]\nbase_url = "https://x.example"\nmodel = "m"\napi_key_env = "NOT_HERE"\n'
    )
    monkeypatch.delenv("NOT_HERE", raising=False)
    assert cli.main(["check", str(path)]) == 0
    told = capsys.readouterr()
    assert told.out == f"{path}: ok, 1 upstreams, 1 routes\n"
    assert f"warning: {path}:4: upstream.a.api_key_env: " in told.err
    assert cli.main(["serve", "--config", str(path)]) == 2
    assert "export NOT_HERE" in capsys.readouterr().err
    monkeypatch.setenv("NOT_HERE", " ")
    assert cli.main(["check", str(path)]) == 2
