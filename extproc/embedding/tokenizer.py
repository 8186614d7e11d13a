"""Text to token ids, by sentencepiece or by a tokenizer.json, and the marks around them; it runs no model.

Neither cuts nor pads: who asks has cut the text, and gives one text a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import sentencepiece

from extproc.embedding.model import ModelError

if TYPE_CHECKING:
    import tokenizers

EXTRA: Final = 'pip install "pointsman[tokenizers]"'
_PROBE: Final = "a small probe"


class Tokenizer(Protocol):
    @property
    def prefix(self) -> Sequence[int]:
        """The marks before a text's ids."""
        ...

    @property
    def suffix(self) -> Sequence[int]: ...

    def ids(self, text: str) -> list[int]:
        """Any str that has a UTF-8 form; never empty where the model could not bear it."""
        ...


def load_tokenizer(path: Path) -> Tokenizer:
    """By the kind of file. Raises ModelError."""
    return _Json(path) if path.suffix == ".json" else _SentencePiece(path)


class _SentencePiece:
    """A sentencepiece model, such as the default model's."""

    def __init__(self, path: Path) -> None:
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"{path}: sentencepiece cannot load it: {error}; install or export it again"
            ) from error
        if min(self._pieces.bos_id(), self._pieces.eos_id()) < 0:
            raise ModelError(f"{path}: it has no marks for start and end of a text")
        self.prefix = [self._pieces.bos_id()]
        self.suffix = [self._pieces.eos_id()]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._pieces.encode(text)
        # The default model was trained with at least one token between the marks; "" has none.
        return found or [self._pieces.unk_id()]


class _Json:
    """A tokenizer.json of the library `tokenizers`, which reads every kind there is."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers  # noqa: PLC0415  an extra: few load such a model, and it brings 30 MB
        except ModuleNotFoundError as error:
            raise ModelError(f"{path}: needs the extra tokenizers: {EXTRA}") from error
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ModelError(
                f"{path}: tokenizers cannot load it: {error}; export the model again"
            ) from error
        # Files ship with the padding and cut of whoever saved them: to 128 tokens, for instance.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.prefix, self.suffix = _marks(self._tokenizer, path)
        # Without marks an empty text would be no tokens at all, and no model takes that.
        self._empty = [] if self.prefix or self.suffix else [0]

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids or self._empty


def _marks(tokenizer: tokenizers.Tokenizer, path: Path) -> tuple[list[int], list[int]]:
    """What the file's own template puts around a text."""
    marked = tokenizer.encode(_PROBE)
    is_mark = marked.special_tokens_mask
    before = len(list(takewhile(bool, is_mark)))
    after = len(list(takewhile(bool, reversed(is_mark[before:]))))
    prefix, suffix = marked.ids[:before], marked.ids[len(marked.ids) - after :]
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    if [*prefix, *plain, *suffix] != marked.ids or not plain:
        raise ModelError(f"{path}: it marks a text within, not only at its ends; use another model")
    return prefix, suffix
