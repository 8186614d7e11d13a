"""`pointsman eval` with the real pool and the real model, as a person calls it."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from extproc.demo import DEMO_CONFIG

PROMPTS = Path(__file__).parents[1] / "data" / "prompts"


def pointsman_eval(*arguments):
    command = [sys.executable, "-m", "extproc.cli", "eval", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """One run that asks for everything."""
    folder = tmp_path_factory.mktemp("eval")
    options = ["--report", folder / "report.html", "--write-thresholds", folder / "out.toml"]
    ended = pointsman_eval(PROMPTS / "demo.jsonl", "--json", *options)
    assert ended.returncode == 0, ended.stderr
    return folder, json.loads(ended.stdout), ended.stderr


def test_demo_routes_its_prompts(evaluated):
    _, found, _ = evaluated
    assert (found["prompts"], found["in_scope"], found["default"]) == (200, 160, "chat")
    assert sum(map(sum, found["confusion"])) == 200
    assert sum(found["reasons"].values()) == 200
    assert found["undecided"] == found["repeated"] == 0
    assert found["accuracy"]["low"] < found["accuracy"]["share"] < found["accuracy"]["high"]
    # Far from what it reaches, far above what chance does: the wiring is what this tests.
    assert found["top_1"]["share"] > 0.65
    assert found["rejection"]["share"] > 0.65
    assert found["auroc"] > 0.65
    assert 0 < found["timing"]["p50_ms"] <= found["timing"]["p95_ms"]


def test_report_and_thresholds_are_written_and_said_so(evaluated):
    folder, found, said = evaluated
    assert "<h1>Routing of" in (folder / "report.html").read_text(encoding="utf-8")
    before, after = (
        path.read_text(encoding="utf-8") for path in (DEMO_CONFIG, folder / "out.toml")
    )
    chosen = found["calibration"]["chosen"]
    routes = tomllib.loads(after)["route"]
    assert {route["name"]: route["threshold"] for route in routes} == chosen
    kept = [line for line in after.split("\n") if not line.startswith("threshold")]
    assert kept == [line for line in before.split("\n") if not line.startswith("threshold")]
    assert f"{folder / 'report.html'}: written" in said


def test_written_thresholds_are_those_that_then_decide(evaluated, tmp_path):
    folder, found, _ = evaluated
    config = tmp_path / "mine.toml"
    config.write_bytes((folder / "out.toml").read_bytes())
    config.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(config)
    options = ["--config", link, "--json", "--write-thresholds", link]
    ended = pointsman_eval(PROMPTS / "demo.jsonl", *options)
    assert ended.returncode == 0, ended.stderr
    again = json.loads(ended.stdout)
    calibration = found["calibration"]
    fits = [calibration["one"], calibration["each"]]
    fit = next(fit for fit in fits if fit["thresholds"] == calibration["chosen"])
    assert again["accuracy"]["share"] == pytest.approx(fit["in_scope"])
    assert again["rejection"]["share"] == pytest.approx(fit["out_of_scope"])
    # In place: through the link, with the rights as they were, and nothing left beside it.
    assert link.is_symlink()
    assert config.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.toml", "mine.toml"]


def test_limit_takes_some_of_each_kind_and_the_table_is_for_people():
    ended = pointsman_eval(PROMPTS / "demo.jsonl", "--limit", "50")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("prompts               50: ")
    for column in ("PRECISION", "THRESHOLD", "ON UNSEEN"):
        assert column in ended.stdout


def test_every_fault_of_the_data_is_named_and_nothing_is_started(tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "a", "route": "cod"}\nnope\n{"text": "a", "route": null}\n')
    ended = pointsman_eval(data)
    assert ended.returncode == 2
    assert ended.stdout == ""
    first, second = ended.stderr.splitlines()
    assert first == f'{data}:1: there is no route "cod"; did you mean "code"?'
    assert second.startswith(f"{data}:2: not valid JSON")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        ([PROMPTS / "demo.jsonl", "--report", "/nowhere/x.html"], "there is no folder /nowhere"),
        ([PROMPTS / "demo.jsonl", "--report", os.curdir], "is a folder"),
        ([PROMPTS / "demo.jsonl", "--write-thresholds", __file__], f"add --config {__file__} to"),
    ],
)
def test_file_that_cannot_be_used_is_named_before_the_work(options, words):
    ended = pointsman_eval(*options)
    assert ended.returncode == 1
    assert words in ended.stderr
    assert "utterances of" not in ended.stderr


def test_data_without_prompts_of_no_route_writes_no_thresholds(tmp_path):
    data = tmp_path / "some.jsonl"
    data.write_text('{"text": "write a parser", "route": "code"}\n')
    ended = pointsman_eval(data, "--write-thresholds", tmp_path / "out.toml")
    assert ended.returncode == 1
    assert ended.stdout.startswith("prompts")  # what was measured is not lost
    assert "thresholds cannot be calibrated" in ended.stderr
    assert not (tmp_path / "out.toml").exists()
