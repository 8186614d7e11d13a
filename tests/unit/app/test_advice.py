"""Who is told to calibrate, and who is left in peace."""

import pytest

from extproc.cli import main

FILE = """
[upstream.x]
base_url = "http://x.example"
model = "m"
[router]
default = "chat"
{encoder}
[[route]]
name = "code"
upstreams = ["x"]
utterances = ["write a function"]
{threshold}
[[route]]
name = "chat"
upstreams = ["x"]
"""
OTHER = '[router.encoder]\npath = "/models/minilm"'


@pytest.mark.parametrize(
    ("encoder", "threshold", "told"),
    [
        ("", "", False),
        (OTHER, "", True),
        (OTHER, "threshold = 0.4", False),
        ("[router.encoder]", "", False),
    ],
)
def test_thresholds_of_another_encoder_are_told_to_be_an_estimate(
    tmp_path, capsys, encoder, threshold, told
):
    path = tmp_path / "pointsman.toml"
    path.write_text(FILE.format(encoder=encoder, threshold=threshold), encoding="utf-8")
    assert main(["check", str(path)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith("ok, 1 upstreams, 2 routes")
    assert bool(rest) == told
    if told:
        assert "those of code are an estimate" in rest[0]
        assert "pointsman eval DATA --write-thresholds" in rest[0]
