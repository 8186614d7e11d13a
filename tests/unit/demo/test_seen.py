"""The record of a scripted upstream."""

import json

from extproc.demo.seen import Ended, Record, Seen


def seen(model="m", body=b"{}", at_s=0.0, **headers):
    return Seen(
        method="POST",
        path="/v1/completions",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        body=body,
        model=model,
        at_s=at_s,
    )


def test_the_oldest_go_first_when_there_are_too_many():
    record = Record(most_requests=2)
    for model in "abc":
        record.add(seen(model))
    assert [kept.model for kept in record.all()] == ["b", "c"]
    assert record.total == 3


def test_large_bodies_push_out_older_ones_but_never_the_newest():
    record = Record(most_body_bytes=10)
    for model in "ab":
        record.add(seen(model, body=b"x" * 6))
    assert [kept.model for kept in record.all()] == ["b"]
    record.add(seen("c", body=b"x" * 100))
    assert [kept.model for kept in record.all()] == ["c"]


def test_the_first_word_on_how_it_ended_counts():
    record = Record()
    serial = record.add(seen())
    record.end(serial, Ended.BROKEN, now_s=1.0)
    record.end(serial, Ended.CLIENT_LEFT, now_s=2.0)
    (kept,) = record.all()
    assert (kept.ended, kept.ended_at_s, kept.cancelled) == (Ended.BROKEN, 1.0, False)


def test_ending_a_dropped_request_is_harmless():
    record = Record()
    serial = record.add(seen())
    record.clear()
    record.end(serial, Ended.ANSWERED, now_s=1.0)
    assert record.all() == []


def test_serials_are_not_reused_after_clearing():
    record = Record()
    first = record.add(seen())
    record.clear()
    assert record.add(seen()) != first


def test_summary_counts_and_shows_the_last():
    record = Record()
    record.end(record.add(seen("a", at_s=1.0)), Ended.ANSWERED, now_s=1.5)
    record.add(seen("b", at_s=2.0))
    summary = record.summary(last=1, now_s=3.0)
    assert summary["ended"] == {"answered": 1, "in_progress": 1}
    assert summary["models"] == {"a": 1, "b": 1}
    (last,) = summary["last"]
    assert (last["model"], last["ago_s"], last["took_s"]) == ("b", 1.0, 1.0)
    assert record.summary(last=0, now_s=3.0)["last"] == []


def test_summary_shows_neither_keys_nor_prompts():
    record = Record()
    secret = {"authorization": "Bearer sk-hush", "cookie": "id=sk-hush", "api_key": "sk-hush"}
    record.add(seen(body=b'{"prompt":"sk-hush"}', x_request_id="r-1", **secret))
    shown = json.dumps(record.summary(last=5, now_s=0.0))
    assert "sk-hush" not in shown
    assert "sk-hush" not in repr(record.all())
    assert "r-1" in shown
    assert '"authorization": "sha256:' in shown
