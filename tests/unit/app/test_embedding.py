"""What is said of an embedding service, and who is told what it says of the utterances."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from extproc.app.embedding import Embedding, Learned, _complaint, _key, running_embedding
from extproc.config import Encoder, parse
from extproc.core.errors import RouteReason
from extproc.core.exchange import NotEmbedded
from extproc.embedding.model import ModelError
from extproc.embedding.service import Failure, Fault

URL = "http://tei.models:8080/v1/embeddings"
SERVICE = Encoder(url=URL, api_key_env="EMBEDDINGS_KEY")
WITHOUT_UTTERANCES = '[upstream.x]\nbase_url = "http://x.example"\nmodel = "m"\n'


def test_long_utterance_counts_with_both_its_vectors():
    one, two = np.zeros((1, 3), np.float32), np.ones((2, 3), np.float32)
    assert Learned({"code": [one, two]}, "").vectors["code"].shape == (3, 3)


def test_followers_are_told_what_is_learned_later():
    embedding = Embedding(None, parallel=1)
    assert embedding.utterances is None
    assert embedding.each is None
    told = []
    embedding.follow(told.append)
    learned = Learned({"code": [np.zeros((1, 3), np.float32)]}, "1")
    embedding.learn(learned)
    assert told == [learned]
    assert embedding.each == learned.each
    assert embedding.utterances.keys() == {"code"}


def test_key_comes_from_the_environment_and_its_absence_is_named():
    assert _key(SERVICE, {"EMBEDDINGS_KEY": "sk"}) == "sk"
    assert _key(Encoder(url=URL), {}) is None
    with pytest.raises(ModelError, match=r"api_key_env: .* EMBEDDINGS_KEY is not set; export"):
        _key(SERVICE, {})


@pytest.mark.parametrize(
    ("key", "said"),
    [("", "is empty"), (" \n", "is blank"), ("hunter2\nx: y", "holds .*line breaks")],
)
def test_key_that_no_header_can_hold_is_refused_and_not_repeated(key, said):
    with pytest.raises(ModelError, match=f"api_key_env: .* EMBEDDINGS_KEY {said}") as caught:
        _key(SERVICE, {"EMBEDDINGS_KEY": key})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("fault", Fault)
def test_complaint_names_address_cause_and_mend(fault):
    said = _complaint(SERVICE, Failure(fault, "status 418", "short and stout"))
    assert said.startswith(f"[router.encoder] url = {URL}: {fault}: status 418 (short and stout); ")
    assert len(said.rpartition("; ")[2]) > 10


def test_without_utterances_nothing_is_loaded_and_nobody_asked():
    async def steps():
        config = parse(WITHOUT_UTTERANCES, file="x", environ=None)
        async with running_embedding(config, None, progress=print) as embedding:
            assert embedding.utterances == {}
            assert await embedding.embed("x", 0.0) == NotEmbedded(RouteReason.DEGRADED_WORKER)

    asyncio.run(steps())
