"""Text to vectors with one ONNX model; the only one that runs onnxruntime, and it knows no process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

# It is read when the library loads: without it, onnxruntime reports to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from extproc.embedding.model import ModelError, ModelFiles
from extproc.embedding.text import END_TOKENS, MAX_TOKENS, bound, lines, paragraphs
from extproc.embedding.tokenizer import load_tokenizer

_INPUTS: Final = {"input_ids", "attention_mask"}
_SEGMENTS: Final = "token_type_ids"
"""A third input that BERT's graphs may have; a single text is all segment 0."""
_LOG_ERRORS_ONLY: Final = 3

Vectors = NDArray[np.float32]


class Encoder:
    """One model in this process; `encode` is not for two threads at once."""

    def __init__(self, files: ModelFiles, threads: int = 1) -> None:
        """Load; raises ModelError."""
        self._tokenizer = load_tokenizer(files.tokenizer)
        self._prefix, self._suffix = self._tokenizer.prefix, self._tokenizer.suffix
        marks = len(self._prefix) + len(self._suffix)
        self._max_ids = min(MAX_TOKENS, files.max_tokens) - marks
        self._end_ids = min(END_TOKENS, files.max_tokens) - marks
        self._session = _load_session(files, threads)
        self._wants_segments = len(self._session.get_inputs()) > len(_INPUTS)
        self.dimension = files.dimension

    def encode(self, text: str) -> Vectors:
        """[k, dimension], L2-normalised: k = 1, or 2 for the first and last part of a long text.

        Any str is safe. One run a vector: an 8-bit model's result depends on its whole batch.
        """
        text = _encodable(bound(text))
        ids = self._tokenizer.ids(text)
        if len(ids) <= self._max_ids:
            return self._run(ids)
        # The question of a long prompt stands at one of its ends; what lies between misleads.
        parts = paragraphs(text)
        head = self._tokenize_end(parts[0], 0)[: self._end_ids]
        tail = self._tokenize_end(parts[-1], -1)[-self._end_ids :]
        return np.concatenate([self._run(head), self._run(tail)])

    def _tokenize_end(self, paragraph: str, index: int) -> list[int]:
        """A paragraph, or its line at `index` when all of it is too long (pasted code, a log)."""
        ids = self._tokenizer.ids(paragraph)
        if len(ids) <= self._end_ids:
            return ids
        return self._tokenizer.ids(lines(paragraph)[index])

    def _run(self, ids: Sequence[int]) -> Vectors:
        marked = np.array([[*self._prefix, *ids, *self._suffix]], np.int64)
        feed = {"input_ids": marked, "attention_mask": np.ones_like(marked)}
        if self._wants_segments:
            feed[_SEGMENTS] = np.zeros_like(marked)
        (vectors,) = self._session.run(None, feed)
        return np.asarray(vectors, np.float32)


def _encodable(text: str) -> str:
    """A lone surrogate has no UTF-8 form, and the tokeniser would raise on it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _load_session(files: ModelFiles, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_ERRORS_ONLY
    try:
        session = onnxruntime.InferenceSession(
            str(files.onnx), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelError(
            f"{files.onnx}: onnxruntime cannot load it: {error}; export it again, or delete it if it "
            "lies in the cache"
        ) from error
    inputs = {value.name for value in session.get_inputs()}
    outputs = [value.shape for value in session.get_outputs()]
    if inputs - {_SEGMENTS} != _INPUTS or len(outputs) != 1 or outputs[0][-1] != files.dimension:
        raise ModelError(
            f"{files.onnx}: expected input_ids and attention_mask to one output of "
            f"{files.dimension} columns, found {sorted(inputs)} to {outputs}"
        )
    return session
