"""What a person and a machine get to read."""

import json

import pytest

from extproc.drill.expectations import Expectation, Verdict, expectations
from extproc.drill.report import Report, document, heading, row_line, table
from extproc.drill.story import Story
from extproc.drill.timeline import Row, timeline


def report(setting, events):
    rows = tuple(timeline(setting, events))
    return Report(setting, rows, tuple(expectations(Story.of(setting, events))))


def test_the_heading_says_what_will_be_done_by_which_rules(setting_of):
    lines = list(heading(setting_of("hang"), "http://127.0.0.1:8080"))
    assert lines[0] == "drill hang: 10 requests a second to http://127.0.0.1:8080, about 10 s"
    assert lines[1] == (
        "policy: 5 failures (5xx, bad_schema, connect_error, timeout) in 30 s, then 3 s open,"
        " then 3 trials at once; 0.5 s to response headers"
    )
    assert row_line(Row(12.34, "hang made on a")) == "  12.3  hang made on a"


def test_the_table_names_what_did_not_hold():
    told = [
        Expectation("a", Verdict.HELD, "1 of 1"),
        Expectation("longer", Verdict.NOT_HELD, "0 of 1"),
        Expectation("b", Verdict.NOT_CONFIGURED, "shown"),
    ]
    assert list(table(told)) == [
        "",
        "held            a       1 of 1",
        "NOT HELD        longer  0 of 1",
        "not configured  b       shown",
        "",
        "1 of 2 expectations NOT HELD",
    ]
    assert list(table(told[:1]))[-1] == "all 1 expectation held"


def test_what_is_not_configured_fails_no_drill(drilled):
    found = report(*drilled("slow_first_token"))
    assert found.held
    assert any(each.verdict is Verdict.NOT_CONFIGURED for each in found.expectations)


@pytest.mark.parametrize("policy", [{}, {"failure_threshold": 1000}])
def test_the_document_is_json_and_agrees_with_the_report(drilled, policy):
    found = report(*drilled("hang", **policy))
    read = json.loads(json.dumps(document([found])))
    assert read["held"] is found.held is (not policy)
    (drill,) = read["drills"]
    assert drill["fault"] == "hang"
    assert drill["policy"]["failure_threshold"] == 5
    assert [row["what"] for row in drill["timeline"]] == [row.text for row in found.rows]
    assert [each["name"] for each in drill["expectations"]] == [e.name for e in found.expectations]
