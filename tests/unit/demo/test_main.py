"""The command line of the demo upstreams."""

import pytest

from extproc.demo.__main__ import Listen, parse_arguments, parse_listen


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("127.0.0.1:18081=coder", Listen("127.0.0.1", 18081, "coder")),
        ("[::1]:18081=coder", Listen("::1", 18081, "coder")),
    ],
)
def test_listen_argument(text, listen):
    assert parse_listen(text) == listen


@pytest.mark.parametrize(
    "text",
    ["18081=coder", ":18081=coder", "127.0.0.1:x=coder", "127.0.0.1:70000=a", "127.0.0.1:1="],
)
def test_bad_listen_argument_is_a_usage_error(text, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--listen", text])
    assert ended.value.code == 2
    assert "HOST:PORT=NAME" in capsys.readouterr().err


def test_two_upstreams_need_two_names(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--listen", "127.0.0.1:1=a", "--listen", "127.0.0.1:2=a"])
    assert "a name of its own" in capsys.readouterr().err
