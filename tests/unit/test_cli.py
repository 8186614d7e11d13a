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
