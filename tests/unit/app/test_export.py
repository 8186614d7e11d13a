"""`pointsman export-model` as one types it, with a tiny model in the place of torch's."""

from __future__ import annotations

import signal
import sys

import pytest
from tiny_model import TinyOriginal

from extproc.app import export as app
from extproc.cli import main
from extproc.embedding.export import Exported
from extproc.embedding.manifest import Manifest, Parity

PARITY = Parity(0.99, 0.98, 3)


@pytest.fixture
def original(monkeypatch, tmp_path):
    """What the command loads; the folder `tmp_path / "model"` exists."""
    (tmp_path / "model").mkdir()
    made = TinyOriginal()
    made.prompts = {}
    monkeypatch.setattr(app, "SentenceTransformersModel", lambda _source: made)
    return made


def exported(**margins):
    manifest = Manifest(
        format=1,
        source="x",
        made_by="x",
        dimension=3,
        max_tokens=256,
        pooling="cls",
        precision="int8",
        parity=PARITY,
        files={},
    )
    return Exported(manifest, {"English": PARITY}, margins, 24_000_000)


def test_parity_is_shown_and_the_folder_is_whole(original, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export-model", str(tmp_path / "model"), str(out)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["PARITY", "TEXTS", "MEAN", "MIN"]
    assert [line.split()[0] for line in shown[1:5]] == ["English", "Chinese", "odd", "all"]
    assert f"{out}: int8, " in shown[6]
    assert f'path = "{out}" under [router.encoder]' in shown[7]
    assert len(list(out.iterdir())) == 3


def test_fp32_keeps_32_bits(original, tmp_path, capsys):
    arguments = ["export-model", str(tmp_path / "model"), str(tmp_path / "out"), "--fp32"]
    assert main(arguments) == 0
    assert "out: fp32, " in capsys.readouterr().out


def test_refusal_is_an_exit_code_and_leaves_nothing(original, tmp_path, capsys):
    original.encode = lambda _text: original.table[0]
    out = tmp_path / "out"
    assert main(["export-model", str(tmp_path / "model"), str(out)]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("pointsman: refused: cosine to the original")
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_model_that_wants_prompts_in_front_says_so(original, tmp_path, capsys):
    original.prompts = {"query": "query: "}
    assert main(["export-model", str(tmp_path / "model"), str(tmp_path / "out")]) == 0
    assert (
        "trained with prompts in front of texts ({'query': 'query: '})" in capsys.readouterr().err
    )


def test_missing_folder_is_told_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(app, "SentenceTransformersModel", None)
    assert main(["export-model", str(tmp_path / "absent"), str(tmp_path / "out")]) == 1
    assert "absent: there is no such folder" in capsys.readouterr().err


def test_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert main(["export-model", "all-MiniLM-L6-v2", str(tmp_path / "out")]) == 1
    assert 'pip install "pointsman[export]"' in capsys.readouterr().err


def test_sigterm_ends_the_command_in_a_way_that_sweeps_its_scratch(original, tmp_path):
    def terminated(_folder):
        signal.raise_signal(signal.SIGTERM)

    original.write = terminated
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["export-model", str(tmp_path / "model"), str(tmp_path / "out")])
    assert caught.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "arguments",
    [[], ["model"], ["--fp32"], ["--static", "model", "out"], ["--static", "--fp32"]],
    ids=" ".join,
)
def test_arguments_that_make_no_sense_are_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["export-model", *arguments])
    assert caught.value.code == 2
    assert "MODEL and OUT, or --static" in capsys.readouterr().err or arguments == ["model"]


def test_language_it_hardly_understands_is_warned_of():
    lines = app.as_lines(exported(English=0.6, Chinese=0.14), app.Path("out"))
    assert [line for line in lines if "warning" in line and "hardly understands Chinese" in line]
    assert not [line for line in lines if "hardly understands English" in line]


def test_languages_alike_are_not_warned_of():
    lines = app.as_lines(exported(English=0.05, Chinese=0.04), app.Path("out"))
    assert "warning" not in " ".join(lines)
