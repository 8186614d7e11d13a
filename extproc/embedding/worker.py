"""The child process: one encoder answering one socket, one text at a time; no queue, no deadline.

    python -m extproc.embedding.worker SOCKET_FD ONNX TOKENIZER DIMENSION DIGEST MAX_TOKENS

It ends when the socket closes, so it never outlives its parent, not even one that was killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

# BLAS reads these when numpy is first imported; a pool of threads made a 7 us product take 8 ms.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

from extproc.embedding import frames
from extproc.embedding.model import ModelError, ModelFiles

if TYPE_CHECKING:
    from extproc.embedding.encoder import Encoder

_NICE: Final = 10
_WARM_UP_WORDS: Final = (1, 6, 30, 120, 240, 600)
"""Lengths that make the runtime allocate and pack what every later length needs."""


def main(argv: list[str]) -> int:
    # A Ctrl-C or a service manager's SIGTERM reaches the whole group; the parent drains first and
    # then closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    fd, onnx, tokenizer, dimension, digest, max_tokens = argv
    files = ModelFiles(Path(onnx), Path(tokenizer), int(dimension), digest, int(max_tokens))
    with socket.socket(fileno=int(fd)) as sock:
        try:
            return serve(sock, files)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the parent left while an answer was on its way


def serve(sock: socket.socket, files: ModelFiles) -> int:
    """Load, warm up, say so, then answer until the socket closes; the exit status."""
    try:
        encoder = _warm_encoder(files)
    except Exception as error:  # noqa: BLE001  the worker boundary: whatever it is, the parent is told
        words = str(error) if isinstance(error, ModelError) else f"{files.onnx}: {error!r}"
        sock.sendall(frames.encode(frames.Unable(words)))
        return 1
    # From here on the loop must not wait for a core: it answers everyone, a worker one prompt. With three
    # times the load, on a machine that others use too, the p95 of decisions was 100 ms and not 1,800.
    os.nice(_NICE)
    sock.sendall(frames.encode(frames.Ready(encoder.dimension)))
    with sock.makefile("rb") as stream:
        while (job := _next_job(stream)) is not None:
            sock.sendall(frames.encode(_answer(encoder, job)))
    return 0


def _warm_encoder(files: ModelFiles) -> Encoder:
    from extproc.embedding.encoder import Encoder  # noqa: PLC0415  so that its failure can be told

    encoder = Encoder(files)
    for words in _WARM_UP_WORDS:
        encoder.encode("word " * words)
    return encoder


def _next_job(stream: BinaryIO) -> frames.Job | None:
    """None: the parent closed its end, or is gone."""
    header = stream.read(frames.HEADER.size)
    if len(header) < frames.HEADER.size:
        return None
    (size,) = frames.HEADER.unpack(header)
    payload = stream.read(size)
    return frames.decode_job(payload) if len(payload) == size else None


def _answer(encoder: Encoder, job: frames.Job) -> frames.Done | frames.Failed:
    started = time.perf_counter()
    try:
        vectors = encoder.encode(job.text.decode("utf-8", "replace"))
    except Exception as error:  # noqa: BLE001  the worker boundary: one text never costs the worker
        return frames.Failed(job.id, type(error).__name__)  # its text might quote the prompt
    return frames.Done(job.id, len(vectors), vectors.tobytes(), time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
