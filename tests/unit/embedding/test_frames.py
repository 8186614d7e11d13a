"""Frames survive any cut of the stream, and nonsense is told apart from frames."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.embedding import frames
from extproc.embedding.frames import Done, Failed, FrameError, Job, Ready, ReplyReader, Unable

REPLIES = [Ready(512), Done(1, 2, b"\0" * 4096, 0.25), Failed(2, "RuntimeError"), Unable("因为")]


@given(st.lists(st.integers(1, 5000), max_size=20))
def test_replies_survive_any_cut(cuts):
    stream = b"".join(map(frames.encode, REPLIES))
    reader, got, start = ReplyReader(), [], 0
    for size in [*cuts, len(stream)]:
        got += reader.feed(stream[start : start + size])
        start += size
    assert got == REPLIES


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Z", "C"))))
def test_any_text_travels(text):
    frame = frames.encode(Job(7, frames.encode_text(text)))
    job = frames.decode_job(frame[frames.HEADER.size :])
    assert job.id == 7
    assert job.text.decode() == text.encode("utf-8", "replace").decode()


def test_lone_surrogate_becomes_a_question_mark():
    assert frames.encode_text("a\ud800b") == b"a?b"


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", frames.HEADER.pack(3) + b"abc", frames.HEADER.pack(0)],
    ids=["too long", "no msgpack", "empty"],
)
def test_nonsense_is_a_frame_error(data):
    with pytest.raises(FrameError):
        ReplyReader().feed(data)


@given(st.binary(max_size=64))
def test_bytes_from_anywhere_raise_nothing_else(data):
    reader = ReplyReader()
    with contextlib.suppress(FrameError):
        reader.feed(data)
