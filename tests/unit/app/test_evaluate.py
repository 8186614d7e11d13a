"""What `pointsman eval` does around an evaluation: progress, and thresholds into a file."""

import itertools
import types

import pytest
from fakes import FakeClock

from extproc.app.evaluate import EvalError, Order, Progress, write_thresholds

CONFIG = """\
[upstream.one]
base_url = "http://one.example"
model = "m"

[[route]]
name = "default"
upstreams = ["one"]
utterances = ["hello"]
"""
FOUND = types.SimpleNamespace(
    calibration=types.SimpleNamespace(chosen=types.SimpleNamespace(thresholds={"default": 0.4}))
)


def test_progress_is_told_often_at_first_and_seldom_on_a_long_run():
    clock, told = FakeClock(0.0), []
    progress = Progress(10_000, lambda _: told.append(clock.now_s), clock=clock)
    for _ in range(10_000):
        clock.advance(0.1)
        progress.advance()
    assert told[0] == pytest.approx(2.0, abs=0.11)
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert gaps[0] == pytest.approx(2.0, abs=0.11)
    assert gaps[-1] == pytest.approx(15.0, abs=0.11)
    assert all(later >= earlier - 0.11 for earlier, later in itertools.pairwise(gaps))


def test_configuration_that_changed_meanwhile_is_not_overwritten(tmp_path):
    config = tmp_path / "x.toml"
    config.write_text(CONFIG + "# edited meanwhile\n")
    with pytest.raises(EvalError, match="changed meanwhile"):
        write_thresholds(Order(config, config), config, CONFIG.encode(), FOUND)
    assert config.read_text().endswith("# edited meanwhile\n")


def test_thresholds_go_into_a_copy_with_the_rest_as_it_was(tmp_path):
    config, copy = tmp_path / "x.toml", tmp_path / "y.toml"
    config.write_text(CONFIG)
    write_thresholds(Order(config, config), copy, CONFIG.encode(), FOUND)
    name = 'name = "default"\n'
    assert copy.read_text() == CONFIG.replace(name, name + "threshold = 0.4\n")
    assert config.read_text() == CONFIG


def test_file_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    order = Order(tmp_path, tmp_path)
    with pytest.raises(EvalError, match="cannot be written"):
        write_thresholds(order, tmp_path / ("y" * 255), CONFIG.encode(), FOUND)
    assert list(tmp_path.iterdir()) == []
