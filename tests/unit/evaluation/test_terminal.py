"""What a person at a terminal reads."""

import pytest

from extproc.evaluation.terminal import as_text, duration, progress_line


def test_figures_tables_and_notes(evaluated):
    text = as_text(
        evaluated(
            ("an utterance of code", "code", (0.8, 0.1, 0.1)),
            ("b", "math", (0.6, 0.2, 0.1)),
            ("c", None, (0.1, 0.1, 0.1)),
        )
    )
    assert "3: 2 in scope, 1 of no route" in text
    assert "in scope, right       50.0 %" in text
    assert "1 code        1  ·  ·" in text
    assert "p50 0.90 ms, p95 1.40 ms; 900 a second with 2 in flight" in text
    assert "one for all routes" in text
    assert "note: 1 prompt in the data and among the routes' utterances" in text


def test_table_lines_have_no_blanks_at_their_ends(evaluated):
    text = as_text(evaluated(("a", "code", (0.8, 0.1, 0.1)), ("b", None, (0.1, 0.1, 0.1))))
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_what_is_needed_to_calibrate_is_said(evaluated):
    assert '"route": null' in as_text(evaluated(("a", "code", (0.8, 0.1, 0.1))))


def test_progress_has_rate_and_time_left():
    line = progress_line(1000, 5500, 2.0)
    assert line == "1,000 of 5,500 prompts (18%), 500 a second, 9 s left"
    assert progress_line(0, 5500, 0.0) == "0 of 5,500 prompts (0%), 0 a second"


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.4, "9 s"), (89, "89 s"), (150, "2 min"), (7200, "2.0 h")]
)
def test_duration_is_said_roughly(seconds, text):
    assert duration(seconds) == text
