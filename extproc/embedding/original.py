"""The model to be exported, as sentence-transformers runs it: the only importer of torch, when asked.

The traced graph is the model's own modules, called as its `encode` calls them, so pooling, further layers
and normalisation are whatever it was published with. Nothing of it is written anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from extproc.embedding.manifest import ONNX, TOKENIZER
from extproc.embedding.model import ModelError
from extproc.embedding.quiet import quietly

EXTRA: Final = 'pip install "pointsman[export]"'
_OPSET: Final = 17
_INPUTS: Final = ("input_ids", "attention_mask")


class SentenceTransformersModel:
    """A model on the processor, ready to encode and to be written. Code that comes with it is not run."""

    def __init__(self, source: str) -> None:
        """`source`: a folder, or a name on the hub, which downloads it. Raises ModelError."""
        # They are read when the libraries load.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with quietly():
            try:
                import sentence_transformers  # noqa: PLC0415  an extra, and 10 s to import
                import transformers  # noqa: PLC0415
            except ModuleNotFoundError as error:
                raise ModelError(
                    f"export-model needs the extra export (no {error.name}): {EXTRA}"
                ) from error
            transformers.utils.logging.disable_progress_bar()
            try:
                self._model = sentence_transformers.SentenceTransformer(source, device="cpu")
            except Exception as error:  # it passes on what five libraries raise
                raise ModelError(
                    f"{source}: sentence-transformers cannot load it: {_first_line(error)}; name a "
                    "folder that SentenceTransformer.save wrote, or a model on the hub, and mind the "
                    "network"
                ) from error
        self._tokenizer: Any = getattr(self._model.tokenizer, "backend_tokenizer", None)
        if self._tokenizer is None or getattr(self._model[0], "auto_model", None) is None:
            kinds = ", ".join(type(module).__name__ for module in self._model)
            raise ModelError(
                f"{source}: not a transformer over text with a tokenizer.json (its parts: {kinds}); "
                "choose another model"
            )
        self.max_tokens = int(self._model.max_seq_length or self._tokenizer_limit())
        self.pooling = self._pooling()

    def _tokenizer_limit(self) -> int:
        # "No limit known" is a number of thirty digits there.
        return min(int(self._model.tokenizer.model_max_length), 512)

    def _pooling(self) -> str:
        for module in self._model:
            if (mode := getattr(module, "pooling_mode", None)) is not None:
                return mode if isinstance(mode, str) else "+".join(mode)
            if hasattr(module, "get_pooling_mode_str"):
                return str(module.get_pooling_mode_str())
        return "in the model"

    @property
    def prompts(self) -> dict[str, str]:
        """Words that it was trained to see in front of a text, by use; those that are not empty."""
        return {name: text for name, text in self._model.prompts.items() if text}

    def encode(self, text: str) -> NDArray[np.float32]:
        """[dimension], L2-normalised, as published; no prompt in front."""
        with quietly():
            vector = self._model.encode(
                text, prompt="", normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vector, np.float32)

    def write(self, folder: Path) -> None:
        """The graph in 32 bits, and the tokeniser. Raises ModelError."""
        self._write_tokenizer(folder / TOKENIZER)
        try:
            with quietly():
                _trace(self._model, folder / ONNX)
        except Exception as error:  # torch raises many kinds, for an operator that ONNX lacks
            raise ModelError(
                f"torch cannot write this model as an ONNX graph: {_first_line(error)}; choose a model "
                "of a common architecture (BERT, MiniLM, MPNet, RoBERTa, XLM-R)"
            ) from error

    def _write_tokenizer(self, path: Path) -> None:
        import tokenizers  # noqa: PLC0415  it comes with sentence-transformers

        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.no_padding()
        copy.no_truncation()
        if getattr(self._model[0], "do_lower_case", False):  # done outside of the tokeniser there
            own = [] if copy.normalizer is None else [copy.normalizer]
            lower = tokenizers.normalizers.Lowercase()
            copy.normalizer = tokenizers.normalizers.Sequence([lower, *own])
        copy.save(str(path))


def _trace(model: Any, path: Path) -> None:
    import torch  # noqa: PLC0415

    class Graph(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            features = dict(zip(_INPUTS, (input_ids, attention_mask), strict=True))
            vector = self.model(features)["sentence_embedding"]
            return torch.nn.functional.normalize(vector, p=2, dim=-1)

    graph = Graph().eval()
    # Two rows, one of them padded, so that neither batch nor mask is taken for a constant.
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    rows, length = "batch", "tokens"
    with torch.inference_mode():
        torch.onnx.export(
            graph,
            (ids, mask),
            str(path),
            dynamo=False,  # torch.export's graphs have a fixed length where a model asks for its own
            opset_version=_OPSET,
            input_names=list(_INPUTS),
            output_names=["embedding"],
            dynamic_axes={name: {0: rows, 1: length} for name in _INPUTS}
            | {"embedding": {0: rows}},
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
