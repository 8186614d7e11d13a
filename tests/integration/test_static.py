"""The static encoder from the published weights: near the model, bounded for any text, built once."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from extproc.embedding import distill
from extproc.embedding.encoder import Encoder
from extproc.embedding.model import ModelError, default_cache_dir, ensure_model
from extproc.embedding.static import StaticEncoder, StaticFiles, find_static, table_path

CACHE = default_cache_dir(os.environ)


@pytest.fixture(scope="module")
def files() -> StaticFiles:
    return distill.ensure_static(CACHE, progress=print)


@pytest.fixture(scope="module")
def static(files) -> StaticEncoder:
    return StaticEncoder(files)


@pytest.fixture(scope="module")
def full() -> Encoder:
    return Encoder(ensure_model(None, cache_dir=CACHE, progress=print))


TEXTS = [
    "How do I fix this compiler error?",
    "what is the weather like in Paris tomorrow",
    "write a poem about autumn leaves",
    "请帮我写一封请假的邮件",
    "这个函数为什么会报空指针异常",
    "¿Cuál es la capital de Francia?",
    "solve the equation 3x + 5 = 20",
]


def test_vectors_are_near_those_of_the_model(static, full):
    cosines = [float(static.encode(text)[0] @ full.encode(text)[0]) for text in TEXTS]
    assert np.mean(cosines) > 0.8
    assert min(cosines) > 0.7


@pytest.mark.parametrize(
    ("text", "near", "far"),
    [
        ("my code does not compile", "fix this compiler error", "what shall I cook tonight"),
        ("代码编译不通过", "修复这个编译错误", "今天晚上吃什么"),
        ("my code does not compile", "修复这个编译错误", "今天晚上吃什么"),
    ],
)
def test_meaning_is_kept_in_and_across_languages(static, text, near, far):
    x, y, z = (static.encode(each)[0] for each in (text, near, far))
    assert x @ y > x @ z + 0.1


ODD = {
    "empty": "",
    "blank": " \n\t ",
    "megabyte": "x" * 1_000_000,
    "words": "a b " * 250_000,
    "chinese": "编译错误修复" * 50_000,
    "surrogates": "\ud800" * 5_000,
    "control": "\x00\x01" * 5_000,
    "emoji": "👩‍👩‍👧" * 5_000,
    "combining": "e\u0301\u0323" * 5_000,
    "lines": "\n" * 50_000,
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_any_text_gives_unit_vectors(static, text):
    vectors = static.encode(text)
    assert vectors.shape in ((1, 512), (2, 512))
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(vectors)), abs=1e-4)


def test_long_text_is_its_first_and_its_last_paragraph(static):
    question = "Why does this function throw a null pointer exception?"
    filler = "The house stood on the hill and nobody had lived there for years. " * 60
    first, last = static.encode(f"{question}\n\n{filler}"), static.encode(f"{filler}\n\n{question}")
    (alone,) = static.encode(question)
    assert (first @ alone).max() > 0.95
    assert (last @ alone).max() > 0.95


def test_texts_together_get_the_vectors_that_each_gets_alone(static):
    texts = [
        *TEXTS,
        "",
        "x",
        "你好" * 2_000,
        "word " * 200,
        "\ud800 lone",
        *["many words " * 30] * 20,
    ]
    together = static.encode_all(texts)
    for text, vectors in zip(texts, together, strict=True):
        alone = static.encode(text)
        assert vectors.shape == alone.shape
        np.testing.assert_allclose(vectors, alone, atol=2e-6)


def test_second_start_finds_it_and_builds_nothing(files, monkeypatch):
    monkeypatch.setattr(distill, "write_table", lambda *_: pytest.fail("built again"))
    assert distill.ensure_static(CACHE, progress=print) == files == find_static(CACHE)


def test_damaged_table_is_not_found_and_built_again(files, tmp_path, monkeypatch):
    path = table_path(tmp_path)
    path.write_bytes(files.table.read_bytes())
    path.with_suffix(".json").write_bytes(files.table.with_suffix(".json").read_bytes())
    assert find_static(tmp_path) is not None
    with path.open("r+b") as file:
        file.truncate(1000)
    assert find_static(tmp_path) is None
    monkeypatch.setattr(distill, "write_table", lambda *args: args[-1].write_bytes(b"new"))
    distill.ensure_static(tmp_path, progress=print)
    assert path.read_bytes() == b"new"


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="POINTSMAN_CACHE"):
        distill.ensure_static(tmp_path / "file" / "cache", progress=print)


def test_file_that_is_no_table_is_an_error_that_names_it(files, tmp_path):
    table = tmp_path / "x.table"
    for content in (b"", b"no table", files.table.read_bytes()[:5000]):
        table.write_bytes(content)
        with pytest.raises(ModelError, match=r"x\.table"):
            StaticEncoder(StaticFiles(table, files.tokenizer, ""))


def test_table_of_a_useless_model_is_refused(static):
    class Deaf:
        def encode(self, text):
            return np.full((1, 512), 512**-0.5, np.float32)

    with pytest.raises(ModelError, match="self-test"):
        distill._check(Deaf())
    distill._check(static)


def test_loading_it_imports_no_runtime_and_no_converter(files):
    """It is loaded in the process that must not die of native code, and must stay light."""
    code = (
        "import sys; from pathlib import Path; from extproc.embedding.static import *; "
        f"StaticEncoder(find_static(Path({str(CACHE)!r}))).encode('x'); "
        "print(sorted({'onnx', 'onnxruntime', 'torch', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_report_of_what_it_costs(static):
    """Printed, not judged: speed never gates a test."""
    for name, text in ({"short": TEXTS[0], "chinese": TEXTS[3]} | ODD).items():
        began = time.thread_time()
        for _ in range(20):
            static.encode(text)
        print(f"{name}: {(time.thread_time() - began) * 50:.3f} ms")


def test_command_builds_it_and_prints_where_it_is(files):
    command = [sys.executable, "-m", "extproc.cli", "export-model", "--static"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{files.table}\n"
