"""What a service may answer, and what is made of it; no socket is opened."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.embedding.service import Failure, Fault, Service, read_answer


def answer(*embeddings, indexes=None):
    items = [{"object": "embedding", "embedding": each} for each in embeddings]
    for item, index in zip(items, indexes or range(len(items)), strict=True):
        item["index"] = index
    return json.dumps({"object": "list", "data": items, "model": "m", "usage": {}}).encode()


def packed(*numbers):
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


def test_floats_and_base64_are_read_alike_and_normalised():
    floats = read_answer(answer([3, 4], [0, 2]), 2)
    assert floats.tolist() == pytest.approx(np.array([[0.6, 0.8], [0, 1]]))
    assert read_answer(answer(packed(3, 4), packed(0, 2)), 2).tolist() == floats.tolist()
    assert floats.dtype == np.float32
    assert not floats.flags.writeable


def test_vectors_stand_in_the_order_of_the_texts():
    assert read_answer(answer([0, 1], [1, 0], indexes=[1, 0]), 2).tolist() == [[1, 0], [0, 1]]


def test_without_indexes_the_order_counts():
    body = json.dumps({"data": [{"embedding": [1, 0]}, {"embedding": [0, 1]}]}).encode()
    assert read_answer(body, 2).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"<html>busy</html>",
        answer([1, 0], [0, 1])[:-20],
        b"[" * 100_000,
        json.dumps({"error": {"message": "no"}}).encode(),
        json.dumps({"data": [{"index": 0}, {"index": 1}]}).encode(),
        answer([1, 0]),
        answer([1, 0], [0, 1], [1, 1]),
        answer([1, 0], [0, 1], indexes=[0, 0]),
        answer([1, 0], [0, 1], indexes=[1, 2]),
        answer([1, 0], [0, 1], indexes=[0, None]),
        answer([1, 0], [0, 1, 0]),
        answer([], []),
        answer([1, 0], [0, 0]),
        answer([1, 0], [1e39, 0]),
        b'{"data": [{"embedding": [1, NaN]}, {"embedding": [1, 0]}]}',
        answer(packed(1, 0), packed(0, np.nan)),
        answer(packed(1, 0), packed(0, np.inf)),
        answer([1, 0], [0, None]),
        answer([1, 0], ["a", 0]),
        answer(packed(1, 0), "****"),
        answer(packed(1, 0), "aGVsbG8="),
        answer(packed(1, 0), ""),
        answer([1, 0], [[1, 0]]),
    ],
    ids=lambda body: body[:60].decode(),
)
def test_whatever_is_no_answer_is_a_bad_schema(body):
    result = read_answer(body, 2)
    assert isinstance(result, Failure)
    assert result.fault is Fault.BAD_SCHEMA
    assert result.words


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "embedding", "index"]), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=80), st.integers(1, 3))
def test_any_answer_is_vectors_or_a_failure(body, count):
    result = read_answer(body, count)
    if not isinstance(result, Failure):
        assert result.shape[0] == count
        assert np.allclose(np.linalg.norm(result, axis=1), 1, atol=1e-5)


def test_calls_in_flight_while_the_first_learns_that_floats_are_wanted_ask_for_them_too(
    monkeypatch,
):
    refused = Failure(Fault.REFUSED, "status 400", detail="no base64 here")
    vectors = np.ones((1, 1), np.float32)

    async def steps():
        service = Service("http://x", model=None, key=None, dimensions=None)
        later = asyncio.Event()

        async def post(body, count):
            if b"base64" not in body:
                return vectors
            if b"second" in body:
                await later.wait()
            return refused

        monkeypatch.setattr(service, "_post", post)
        second = asyncio.create_task(service.embed(["second"], timeout_s=5))
        await asyncio.sleep(0)
        assert await service.embed(["first"], timeout_s=5) is vectors
        later.set()
        assert await second is vectors

    asyncio.run(steps())
