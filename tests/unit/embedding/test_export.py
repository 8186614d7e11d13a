"""Parity, refusal, manifest, and loading what was exported: with a tiny model, without torch."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import pytest
import tiny_model
from tiny_model import DIMENSION, TinyOriginal

from extproc.embedding import export as exporting
from extproc.embedding import model
from extproc.embedding.encoder import Encoder
from extproc.embedding.export import ParityError, export
from extproc.embedding.manifest import read_manifest
from extproc.embedding.model import ModelError, ensure_model
from extproc.embedding.original import SentenceTransformersModel

FILES = ["model.onnx", "pointsman.json", "tokenizer.json"]


def run(original, out, precision="fp32"):
    return export(
        original, out, source="tiny", made_by="a test", precision=precision, progress=print
    )


def load(folder):
    return ensure_model(str(folder), cache_dir=folder, progress=print)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "tiny"
    run(TinyOriginal(), out)
    return out


@pytest.fixture
def folder(exported, tmp_path):
    """A copy to be damaged."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in FILES:
        (copy / name).write_bytes((exported / name).read_bytes())
    return copy


# --- export ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_exported_model_is_loaded_and_true_to_the_original(tmp_path, precision):
    original = TinyOriginal()
    found = run(original, tmp_path / "out", precision)
    assert found.manifest.parity.min > (0.99999 if precision == "fp32" else 0.98)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    encoder = Encoder(load(tmp_path / "out"))
    for text in ("hello world", "Write a function!", "你好", ""):
        (vector,) = encoder.encode(text)
        assert float(vector @ original.encode(text)) > 0.98, text


def test_weights_become_bytes(tmp_path):
    run(TinyOriginal(), tmp_path / "out", "int8")
    graph = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    kinds = {value.data_type for value in graph.initializer if np.prod(value.dims) >= 512}
    assert kinds <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}


def test_manifest_tells_what_the_model_is(exported):
    manifest = read_manifest(exported)
    assert manifest.source == "tiny"
    assert (manifest.dimension, manifest.max_tokens) == (DIMENSION, 64)
    assert (manifest.pooling, manifest.precision) == ("mean", "fp32")
    assert manifest.parity.texts > 50
    assert len(manifest.digest) == 64


class Wrong(TinyOriginal):
    """Its graph has another weight than it encodes with."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def write(self, folder):
        true = self.weight
        self.weight = true + self.noise * np.random.default_rng(1).normal(size=true.shape).astype(
            "f4"
        )
        super().write(folder)
        self.weight = true


@pytest.mark.parametrize(
    ("precision", "mend"), [("int8", "try --fp32"), ("fp32", "choose another one")]
)
def test_model_that_differs_is_refused_and_leaves_nothing(tmp_path, precision, mend):
    with pytest.raises(ParityError, match=rf"refused: cosine .*at least 0\.98.*{mend}"):
        run(Wrong(1.0), tmp_path / "out", precision)
    assert list(tmp_path.iterdir()) == []


def test_small_difference_passes(tmp_path):
    found = run(Wrong(0.02), tmp_path / "out")
    assert 0.98 < found.manifest.parity.mean < 0.99999


def test_one_text_that_is_wrong_is_refused_in_spite_of_the_mean(tmp_path):
    class BlindToOne(TinyOriginal):
        def encode(self, text):
            return -super().encode(text) if text == "" else super().encode(text)

    with pytest.raises(ParityError, match=r"-1\.0000 at worst"):
        run(BlindToOne(), tmp_path / "out")


def test_vector_that_is_no_number_is_refused(tmp_path):
    class Broken(TinyOriginal):
        def encode(self, text):
            return np.full(DIMENSION, np.nan, np.float32)

    with pytest.raises(ParityError, match="nan on average"):
        run(Broken(), tmp_path / "out")


def test_failure_midway_leaves_nothing(tmp_path):
    class Failing(TinyOriginal):
        def write(self, folder):
            super().write(folder)
            raise ModelError("no such operator")

    with pytest.raises(ModelError, match="no such operator"):
        run(Failing(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_graph_in_several_files_is_refused(tmp_path):
    class Huge(TinyOriginal):
        def write(self, folder):
            super().write(folder)
            (folder / "weights.bin").write_bytes(b"2 GB")

    with pytest.raises(ModelError, match=r"over 2 GB, in several files \(weights\.bin\)"):
        run(Huge(), tmp_path / "out")


@pytest.mark.parametrize("what", ["full folder", "file", "no parent"])
def test_target_that_is_taken_is_refused_before_the_work(tmp_path, what):
    out = tmp_path / "out"
    if what == "full folder":
        out.mkdir()
        (out / "mine").write_text("precious")
    elif what == "file":
        out.write_text("precious")
    else:
        out = tmp_path / "absent" / "out"
    with pytest.raises(ModelError, match=r"out: (exists; name a new folder|there is no folder)"):
        run(None, out)


def test_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    run(TinyOriginal(), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


def test_longest_text_reaches_the_models_limit(tmp_path, monkeypatch):
    asked = []

    class Watched(TinyOriginal):
        def encode(self, text):
            asked.append(len(self._tokenizer.encode(text).ids))
            return super().encode(text)

    run(Watched(), tmp_path / "out")
    assert 60 <= max(asked) <= 64


def test_language_that_means_nothing_shows_in_the_margins(tmp_path, monkeypatch):
    monkeypatch.setattr(
        exporting, "TRIPLES", {"A": [("hello", "hello", "python")], "B": [("龘", "龘", "靐")]}
    )
    margins = run(TinyOriginal(), tmp_path / "out").margins
    assert margins["A"] > 0.1
    assert margins["B"] == pytest.approx(0)


def test_missing_extra_names_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ModelError, match=r'pip install "pointsman\[export\]"'):
        SentenceTransformersModel("any")


# --- loading ---------------------------------------------------------------------------------------


def test_folder_and_file_name_the_same_model(exported):
    assert load(exported) == load(exported / "model.onnx")
    assert load(exported).max_tokens == 64


@pytest.mark.parametrize("max_tokens", [16, 64, 200, 512])
def test_no_run_is_longer_than_the_model_takes(tmp_path, max_tokens, monkeypatch):
    run(TinyOriginal(max_tokens), tmp_path / "out")
    encoder = Encoder(load(tmp_path / "out"))
    lengths = []
    real = encoder._session

    class Session:
        @staticmethod
        def run(_, feed):
            lengths.append(feed["input_ids"].shape[1])
            return real.run(None, feed)

    encoder._session = Session
    assert encoder.encode("a " * (min(max_tokens, 256) - 2)).shape == (1, DIMENSION)
    assert encoder.encode("a " * (min(max_tokens, 256) - 1)).shape == (2, DIMENSION)
    assert max(lengths) == min(max_tokens, 256)
    assert lengths[1:] == [min(max_tokens, 128)] * 2


@pytest.mark.parametrize(
    "text",
    ["", " ", "\x00", "\ud800", "a\udfff", "😀" * 500, "a" * 1_000_000, "你 " * 500_000, "\n" * 99],
    ids=lambda text: f"{text[:2]!r}x{len(text)}",
)
def test_any_text_is_bounded_and_safe(exported, text):
    vectors = Encoder(load(exported)).encode(text)
    assert vectors.shape in {(1, DIMENSION), (2, DIMENSION)}
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_graph_that_wants_segments_gets_zeros(tmp_path):
    plain, with_segments = TinyOriginal(), TinyOriginal(segments=True)
    run(with_segments, tmp_path / "out")
    (vector,) = Encoder(load(tmp_path / "out")).encode("hello world")
    assert float(vector @ plain.encode("hello world")) > 0.99999


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(folder)


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["torn", "another"])
def test_file_that_is_not_the_manifests_is_named(folder, name, damage):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-10] if damage == "torn" else content + b" ")
    with pytest.raises(ModelError, match=rf"{name}: not the file .*copy the whole folder again"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: b"", "torn, or not ours"),
        (lambda _: b'{"format": 1}', "torn, or not ours"),
        (lambda it: json.dumps(it | {"format": 2}).encode(), "its format is 2"),
        (lambda it: json.dumps(it | {"max_tokens": 1}).encode(), "not ours"),
        (lambda it: json.dumps(it | {"dimension": 7}).encode(), "32 columns"),
        (lambda it: json.dumps(it | {"files": {"../x": ""}}).encode(), "not ours"),
    ],
    ids=["empty", "torn", "newer", "no tokens", "other dimension", "other files"],
)
def test_manifest_that_is_torn_or_foreign_is_named(folder, change, words):
    path = folder / "pointsman.json"
    path.write_bytes(change(json.loads(path.read_bytes())))
    with pytest.raises(ModelError, match=rf"(pointsman\.json|model\.onnx): .*{words}"):
        load(folder)


def test_onnx_file_beside_anothers_manifest_is_refused(folder):
    (folder / "model.onnx").rename(folder / "other.onnx")
    (folder / "model.onnx").write_bytes((folder / "other.onnx").read_bytes())
    with pytest.raises(ModelError, match=r"other\.onnx: not the model of pointsman\.json"):
        load(folder / "other.onnx")


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx2 avx_vnni", False),
        ("flags\t\t: fpu avx2 avx512f", True),
        ("Features\t: fp asimd", False),
        (None, False),
    ],
    ids=["server", "desktop", "old", "arm", "no file"],
)
def test_processor_without_exact_8_bit_products_is_known(tmp_path, cpuinfo, expected):
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}\n")
    assert model.saturates(tmp_path / "cpuinfo") is expected


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("old", [True, False])
def test_8_bits_on_such_a_processor_are_told_of_at_start(tmp_path, monkeypatch, precision, old):
    run(TinyOriginal(), tmp_path / "out", precision)
    monkeypatch.setattr(model, "saturates", lambda: old)
    said = []
    ensure_model(str(tmp_path / "out"), cache_dir=tmp_path, progress=said.append)
    assert bool(said) == (old and precision == "int8")


def test_another_export_is_another_digest(exported, tmp_path):
    other = TinyOriginal()
    other.weight = other.weight * 2
    run(other, tmp_path / "out")
    assert load(tmp_path / "out").digest != load(exported).digest


def test_text_as_published_is_what_is_tokenised(exported):
    assert tiny_model.tokenizer().padding is not None, "or the fixture shows nothing"
    assert len(Encoder(load(exported))._tokenizer.ids("hello")) == 1
