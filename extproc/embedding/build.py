"""A child process that writes the default model and tests it; it knows no cache, lock or pool.

    python -m extproc.embedding.build WEIGHTS TOKENIZER OUT PRECISION

A process of its own, so that the hundreds of megabytes it needs for a moment are given back. Lines on
stdout are progress; after a failure the last one says what failed, and the exit status is 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from extproc.embedding.encoder import Encoder
from extproc.embedding.graph import DIMENSION, Precision, build_graph
from extproc.embedding.model import ModelError, ModelFiles

_MARGIN: Final = 0.2
"""By how much a paraphrase must be closer than an unrelated text; the model as published has 0.4."""

_SELF_TEST: Final = (
    ("How do I fix this compiler error?", "My program does not compile", "Book a table for two"),
    ("What will the weather be like tomorrow?", "Is it going to rain?", "Sort a list in Python"),
    ("帮我修复这个编译错误", "我的程序编译失败了，怎么办？", "今天晚上吃什么好"),
    ("明天天气怎么样？", "明天会下雨吗？", "写一个排序算法"),
    ("How do I fix this compiler error?", "怎么修复这个编译错误？", "今天晚上吃什么好"),
)
"""A text, one that means the same, one that does not."""


def write_model(weights: Path, out: Path, *, precision: Precision) -> None:
    with np.load(weights, allow_pickle=False) as arrays:
        model = build_graph({name: arrays[name] for name in arrays.files}, precision=precision)
    onnx.save(model, str(out))


def check_model(files: ModelFiles) -> float:
    """The smallest margin of the self-test; raises ModelError when it is too small."""
    encoder = Encoder(files)
    worst = 1.0
    for text, paraphrase, unrelated in _SELF_TEST:
        a, b, c = (encoder.encode(each)[0] for each in (text, paraphrase, unrelated))
        worst = min(worst, float(a @ b - a @ c))
    if not worst >= _MARGIN:  # also when it is not a number
        raise ModelError(
            f"{files.onnx}: fails its self-test (margin {worst:.2f}, needs {_MARGIN}): onnxruntime "
            "computes wrongly on this machine; try another version of it"
        )
    return worst


def main(argv: list[str]) -> int:
    weights, tokenizer, out = map(Path, argv[:3])
    try:
        print("building the ONNX graph", flush=True)  # noqa: T201  the parent reads it
        write_model(weights, out, precision=Precision(argv[3]))
        margin = check_model(ModelFiles(out, tokenizer, DIMENSION, digest=""))
        print(f"self-test passed (margin {margin:.2f})", flush=True)  # noqa: T201
    except (ModelError, OSError, MemoryError) as error:
        print(str(error) or type(error).__name__, flush=True)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
