"""Text to vectors with one ONNX model; the only importer of onnxruntime, and it knows no process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

# It is read when the library loads: without it, onnxruntime reports to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime
import sentencepiece
from numpy.typing import NDArray

from extproc.embedding.model import ModelError, ModelFiles
from extproc.embedding.text import END_TOKENS, MAX_TOKENS, bound, lines, paragraphs

_INPUTS: Final = {"input_ids", "attention_mask"}
_LOG_ERRORS_ONLY: Final = 3

Vectors = NDArray[np.float32]


class Encoder:
    """One model in this process; `encode` is not for two threads at once."""

    def __init__(self, files: ModelFiles, threads: int = 1) -> None:
        """Load; raises ModelError."""
        self._tokenizer = _load_tokenizer(files)
        self._bos: int = self._tokenizer.bos_id()
        self._eos: int = self._tokenizer.eos_id()
        self._session = _load_session(files, threads)
        self.dimension = files.dimension

    def encode(self, text: str) -> Vectors:
        """[k, dimension], L2-normalised: k = 1, or 2 for the first and last part of a long text.

        Any str is safe. One run a vector: an 8-bit model's result depends on its whole batch.
        """
        text = _encodable(bound(text))
        ids = self._tokenize(text)
        if len(ids) + 2 <= MAX_TOKENS:
            return self._run(ids)
        # The question of a long prompt stands at one of its ends; what lies between misleads.
        parts = paragraphs(text)
        head = self._tokenize_end(parts[0], 0)[: END_TOKENS - 2]
        tail = self._tokenize_end(parts[-1], -1)[-(END_TOKENS - 2) :]
        return np.concatenate([self._run(head), self._run(tail)])

    def _tokenize_end(self, paragraph: str, index: int) -> list[int]:
        """A paragraph, or its line at `index` when all of it is too long (pasted code, a log)."""
        ids = self._tokenize(paragraph)
        return ids if len(ids) + 2 <= END_TOKENS else self._tokenize(lines(paragraph)[index])

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        # The model was trained with at least one token between the marks; "" has none.
        return ids or [self._tokenizer.unk_id()]

    def _run(self, ids: Sequence[int]) -> Vectors:
        marked = np.array([[self._bos, *ids, self._eos]], np.int64)
        feed = {"input_ids": marked, "attention_mask": np.ones_like(marked)}
        (vectors,) = self._session.run(None, feed)
        return np.asarray(vectors, np.float32)


def _encodable(text: str) -> str:
    """A lone surrogate has no UTF-8 form, and the tokeniser would raise on it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _load_tokenizer(files: ModelFiles) -> sentencepiece.SentencePieceProcessor:
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(files.tokenizer))
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{files.tokenizer}: sentencepiece cannot load it: {error}; install or export it again"
        ) from error
    if min(tokenizer.bos_id(), tokenizer.eos_id()) < 0:
        raise ModelError(f"{files.tokenizer}: it has no marks for start and end of a text")
    return tokenizer


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
    if inputs != _INPUTS or len(outputs) != 1 or outputs[0][-1] != files.dimension:
        raise ModelError(
            f"{files.onnx}: expected input_ids and attention_mask to one output of "
            f"{files.dimension} columns, found {sorted(inputs)} to {outputs}"
        )
    return session
