"""Reading `tokenizer.json`: ahead of time, with checks of the model's files."""

import json
import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from smart_embedder.errors import StartupError
from smart_embedder.models import tokenizer_files
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.models.tokenizer_files import parse_ahead
from tests.support.wordpiece import change


def test_lower_case_option(kinds) -> None:
    for folder in kinds.values():
        capital, small = "Hybrid SEARCH", "hybrid search"
        tokenizer = TextTokenizer.from_folder(folder, 50, lower_case=True)
        first, second = tokenizer.encode([capital, small])
        assert first.ids.tolist() == second.ids.tolist()
        (plain,) = TextTokenizer.from_folder(folder, 50).encode([small])
        assert plain.ids.tolist() == second.ids.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"holds no tokenizer\.json"),
        ('{"model": ', r"tokenizer\.json cannot be read"),
        ("[" * 100_000, r"tokenizer\.json cannot be read"),
        # Rust code of the tokenizers library panics, which Python sees as no `Exception`.
        ('{"normalizer": {"type": "Precompiled"}}', r"tokenizer\.json cannot be read"),
    ],
)
def test_missing_or_damaged_tokenizer_is_refused(tmp_path: Path, content, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=message):
        TextTokenizer.from_folder(tmp_path, 10)


def test_parse_ahead_parses_a_file_once_unless_it_is_replaced(
    tiny_m3: Path, tmp_path: Path, monkeypatch
) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    path, parsed = folder / "tokenizer.json", []
    parse = tokenizer_files._parse
    monkeypatch.setattr(
        tokenizer_files, "_parse", lambda content: parsed.append(content) or parse(content)
    )
    content = path.read_bytes()
    with parse_ahead([path, path, tmp_path / "missing"]):
        TextTokenizer.from_folder(folder, 50)
        assert parsed == [content]
        path.write_bytes(content + b"\n")
        TextTokenizer.from_folder(folder, 50)
    assert parsed == [content, content + b"\n"]
    TextTokenizer.from_folder(folder, 50)
    assert len(parsed) == 3


def test_parse_ahead_leaves_errors_to_from_folder(
    tiny_m3: Path, tmp_path: Path, monkeypatch
) -> None:
    def changed(path: Path) -> bytes:
        raise StartupError(f"{path} was changed")

    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(b"{")
    os.mkfifo(tmp_path / "pipe")
    with parse_ahead([tmp_path / "pipe", tmp_path, folder / "tokenizer.json"]):
        with pytest.raises(StartupError, match="cannot be read"):
            TextTokenizer.from_folder(folder, 50)
        monkeypatch.setattr(tokenizer_files, "read_file", changed)
        with parse_ahead([folder / "tokenizer.json"]):
            pass


def test_tokenizer_with_more_tokens_than_embeddings_is_refused(tiny_m3: Path, tmp_path) -> None:
    config = json.loads((tiny_m3 / "config.json").read_text())
    shutil.copy(tiny_m3 / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<added>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    assert tokens > tokenizer.get_vocab_size(with_added_tokens=False)
    del config["vocab_size"]
    for size in (None, tokens + 1, tokens, tokens - 1):
        changed = config if size is None else config | {"vocab_size": size}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        if size == tokens - 1:
            with pytest.raises(StartupError, match=f"has {tokens} tokens, and the model only"):
                TextTokenizer.from_folder(tmp_path, 10)
        else:
            TextTokenizer.from_folder(tmp_path, 10)


def test_tokenizer_with_dropout_is_refused(kinds, tmp_path: Path) -> None:
    folder = shutil.copytree(kinds["qwen"], tmp_path / "model")
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    written = json.loads((folder / "tokenizer.json").read_text())
    written["model"]["dropout"] = 0.1
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(StartupError, match="splits a text differently each time"):
        TextTokenizer.from_folder(folder, 100)


@pytest.mark.parametrize(
    ("kind", "unknown"), [("bert", {"unk_token": "[NONE]"}), ("xlm-roberta", {"unk_id": None})]
)
def test_tokenizer_without_its_unknown_token_is_refused(
    kinds, tmp_path: Path, kind, unknown
) -> None:
    folder = shutil.copytree(kinds[kind], tmp_path / "model")
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    written = json.loads((folder / "tokenizer.json").read_text())
    written["model"] |= unknown
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(StartupError, match="the tokenizer cannot read an unknown word: "):
        TextTokenizer.from_folder(folder, 100)


@pytest.mark.parametrize(
    ("in_config", "in_file", "logged"),
    [("left", None, True), (None, "Left", True), ("right", "Left", False)],
)
def test_left_truncation_side_of_a_tokenizer_is_logged(
    kinds, tmp_path: Path, in_config, in_file, logged
) -> None:
    folder = shutil.copytree(kinds["bert"], tmp_path / "model")
    if in_config is not None:
        change(folder / "tokenizer_config.json", truncation_side=in_config)
    if in_file is not None:
        limits = {"direction": in_file, "max_length": 9, "strategy": "LongestFirst", "stride": 0}
        change(folder / "tokenizer.json", truncation=limits)
    with capture_logs() as logs:
        TextTokenizer.from_folder(folder, 100)
    assert [line["event"] for line in logs] == ["truncation_side_not_followed"] * logged
    sides = AutoTokenizer.from_pretrained(folder).truncation_side
    assert (sides == "left") == logged
