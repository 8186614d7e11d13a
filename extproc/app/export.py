"""`pointsman export-model MODEL OUT`: loads the original, has it exported, says how true the result is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Final

from extproc.embedding.export import Exported, Precision, check_target, export
from extproc.embedding.model import ModelError
from extproc.embedding.original import SentenceTransformersModel

_UNDERSTOOD: Final = 0.5
"""Of the best language's margin, what another one has at least: the default model has 0.94, and
all-MiniLM-L6-v2, which has no Chinese words, 0.25."""


def export_model(
    source: str,
    out: Path,
    *,
    precision: Precision,
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """`show` gets the result, `say` the progress. Raises ModelError."""
    out = out.expanduser()
    check_target(out)
    if source.startswith((".", "/", "~")):  # no name on the hub
        source = str(Path(source).expanduser())
        if not Path(source).is_dir():
            raise ModelError(f"{source}: there is no such folder")
    say(f"loading {source}")
    with _cleaning_up():
        original = SentenceTransformersModel(source)
        if original.prompts:
            say(
                f"note: it was trained with prompts in front of texts ({original.prompts}); Pointsman "
                "puts none, neither before prompts nor before utterances"
            )
        made_by = f"pointsman {metadata.version('pointsman')}"
        found = export(
            original, out, source=source, made_by=made_by, precision=precision, progress=say
        )
    for line in as_lines(found, out):
        show(line)


def as_lines(found: Exported, out: Path) -> list[str]:
    manifest = found.manifest
    table = [("PARITY", "TEXTS", "MEAN", "MIN")]
    rows = [*found.by_language.items(), ("all", manifest.parity)]
    table += [(name, str(each.texts), f"{each.mean:.4f}", f"{each.min:.4f}") for name, each in rows]
    lines = [f"{name:<10}{texts:>5}{mean:>9}{least:>9}" for name, texts, mean, least in table]
    size = f"{found.size_bytes / 1e6:.0f} MB"
    kind = f"{manifest.dimension} dimensions, pooling {manifest.pooling}"
    lines += [
        "",
        f"{out}: {manifest.precision}, {size}, {kind}, up to {manifest.max_tokens} tokens",
        f'to use it: path = "{out.absolute()}" under [router.encoder]',
    ]
    best = max(found.margins.values())
    lines += [
        f"warning: it hardly understands {language}: a paraphrase is nearer than an unrelated text by "
        f"{margin:.2f}, and by {best:.2f} in its best language; prompts in {language} will be misrouted"
        for language, margin in found.margins.items()
        if not margin >= _UNDERSTOOD * best
    ]
    return lines


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """SIGTERM leaves no scratch folder either."""

    def stop(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
