"""Ids and marks of a tokenizer.json, whatever it was published with."""

from __future__ import annotations

import sys

import pytest
import tiny_model
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from extproc.embedding.model import ModelError
from extproc.embedding.tokenizer import load_tokenizer


@pytest.fixture
def path(tmp_path):
    tiny_model.tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_padding_and_cut_of_the_file_are_off(path):
    found = load_tokenizer(path)
    assert len(found.ids("hello")) == 1
    assert len(found.ids("hello " * 100)) == 100


def test_marks_are_those_of_the_files_template(path):
    found = load_tokenizer(path)
    assert (found.prefix, found.suffix) == ([tiny_model.CLS], [tiny_model.SEP])
    for text in ("", "hello", "Hello WORLD", "xyz 你好 漢"):
        expected = tiny_model.TinyOriginal().ids(text)
        assert [*found.prefix, *found.ids(text), *found.suffix] == expected


def test_case_is_folded_where_the_file_says_so(path):
    found = load_tokenizer(path)
    assert found.ids("HELLO World") == found.ids("hello world")


def test_file_without_marks_never_gives_an_empty_text(tmp_path):
    bare = tiny_model.tokenizer()
    bare.post_processor = processors.Sequence([])
    bare.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path / "tokenizer.json")
    assert not [*found.prefix, *found.suffix]
    assert found.ids("hello")
    assert len(found.ids("")) == 1


def test_mark_at_one_end_only(tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path / "tokenizer.json")
    assert (found.prefix, found.suffix, found.ids("a")) == ([], [0], [1])


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe", b'{"version": "1.0"}'])
def test_torn_or_foreign_file_is_named(path, content):
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: tokenizers cannot load it"):
        load_tokenizer(path)


def test_missing_package_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ModelError, match=r'tokenizer\.json: .*pip install "pointsman\[tokenizers\]"'
    ):
        load_tokenizer(path)
