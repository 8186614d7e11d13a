"""A model of random weights in BERT's shape: a WordPiece tokenizer.json, a graph with pooling inside."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper
from tokenizers import models, normalizers, pre_tokenizers, processors

DIMENSION = 32
CLS, SEP, UNKNOWN = 1, 2, 3
WORDS = ("hello", "world", "write", "function", "python", "the", "a", "to", "is", "how", "you")
LETTERS = [*string.ascii_lowercase, *string.digits, *"?!.,'()你好写一个函数的是怎么"]
VOCABULARY = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
VOCABULARY += [each for each in LETTERS if each not in VOCABULARY]
VOCABULARY += [f"##{each}" for each in (*string.ascii_lowercase, *string.digits)]


def tokenizer() -> tokenizers.Tokenizer:
    """As files are published: with padding, and a cut to few tokens."""
    made = tokenizers.Tokenizer(
        models.WordPiece({each: at for at, each in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    made.enable_padding(length=16)
    made.enable_truncation(16)
    return made


class TinyOriginal:
    """The network in numpy; what `export` takes for the model as published."""

    pooling = "mean"

    def __init__(self, max_tokens: int = 64, *, segments: bool = False) -> None:
        chance = np.random.default_rng(0)
        self.max_tokens = max_tokens
        self.segments = segments
        self.table = chance.normal(size=(len(VOCABULARY), DIMENSION)).astype(np.float32)
        self.weight = chance.normal(size=(DIMENSION, DIMENSION)).astype(np.float32)
        self._tokenizer = tokenizer()
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode(self, text: str) -> np.ndarray:
        vector = np.tanh(self.table[self.ids(text)] @ self.weight).mean(axis=0)
        return vector / np.linalg.norm(vector)

    def write(self, folder: Path) -> None:
        onnx.save(self.graph(), str(folder / "model.onnx"))
        tokenizer().save(str(folder / "tokenizer.json"))

    def graph(self, columns: int | None = None) -> onnx.ModelProto:
        """`columns`: what it says of its output, which tracing leaves open."""
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if self.segments else [])]
        weights = {"table": self.table, "weight": self.weight}
        last = np.array([-1], np.int64)
        nodes = [
            helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
            helper.make_node("MatMul", ["embedded", "weight"], ["product"]),
            helper.make_node("Tanh", ["product"], ["hidden"]),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
            helper.make_node("Mul", ["hidden", "column"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "middle"], ["sum"], keepdims=0),
            helper.make_node("ReduceL2", ["sum"], ["norm"], axes=[-1], keepdims=1),
            helper.make_node("Div", ["sum", "norm"], ["embedding"]),
        ]
        if self.segments:  # any segment but 0 would move the vector
            nodes[2:2] = [
                helper.make_node("Cast", ["token_type_ids"], ["segment"], to=TensorProto.FLOAT),
                helper.make_node("Unsqueeze", ["segment", "last"], ["shift"]),
                helper.make_node("Add", ["product", "shift"], ["moved"]),
            ]
            nodes[5] = helper.make_node("Tanh", ["moved"], ["hidden"])
        graph = helper.make_graph(
            nodes,
            "tiny",
            [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "t"]) for name in names],
            [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["b", columns or "d"])],
            [numpy_helper.from_array(value, name) for name, value in weights.items()]
            + [
                numpy_helper.from_array(last, "last"),
                numpy_helper.from_array(np.array([1], np.int64), "middle"),
            ],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
