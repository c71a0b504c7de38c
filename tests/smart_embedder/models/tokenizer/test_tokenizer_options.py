"""What files beside `tokenizer.json` change, as in transformers 4, and what is only a warning.

The expected ids are those of a `tokenizer.json` with the change in it. transformers 4.57 computes
the same; the suite has transformers 5, which agrees for tokens and the options of BERT's classes.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.models.tokenizer_options import EXAMPLES
from tests.support.checkpoints import minilm_folder
from tests.support.wordpiece import change

Change = Callable[[Path], None]
TEXTS = [
    *EXAMPLES, "Hybrid SEARCH of Émile", "naïve  montaña", "検索世界", " sea", "the Sea",
    "a [SEP] b <s> c <|im_end|> d", "sea, season!", "\u2603 abcdefgh", "[NEW] sea [END]",
]  # fmt: skip


def in_file(*path: str, **changes: Any) -> Change:
    """Return a function that changes the object at a path in `tokenizer.json`."""

    def apply(folder: Path) -> None:
        written = json.loads((folder / "tokenizer.json").read_text())
        part = written
        for name in path:
            part = part[name]
        part.update(changes)
        (folder / "tokenizer.json").write_text(json.dumps(written))

    return apply


def with_token(token_id: int | None, **token: Any) -> Change:
    """Return a function that adds a token to `tokenizer.json`, by default the next."""

    def apply(folder: Path) -> None:
        written = json.loads((folder / "tokenizer.json").read_text())
        entry = {"lstrip": False, "rstrip": False, "single_word": False} | token
        entry["id"] = written["model"]["vocab"].get(token["content"], token_id)
        written["added_tokens"].append(entry)
        (folder / "tokenizer.json").write_text(json.dumps(written))

    return apply


def beside(file: str, **members: Any) -> Change:
    """Return a function that sets members of another file."""

    def apply(folder: Path) -> None:
        path = folder / f"{file}.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | members))

    return apply


def ends(*tokens: str) -> Change:
    """Return a function that writes tokens around texts in `tokenizer.json`."""
    special = {token: {"id": token, "ids": [0], "tokens": [token]} for token in tokens}
    part = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    single = [*part, {"Sequence": {"id": "A", "type_id": 0}}, *part]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair}
    return in_file(post_processor=template | {"special_tokens": special})


CONFIG, MAP = "tokenizer_config", "special_tokens_map"
CASED = in_file("normalizer", lowercase=False)
SPACE = in_file("pre_tokenizer", add_prefix_space=True)
PLAIN = {"special": True, "normalized": False}
LOWER = ["do_lower_case", "strip_accents"]
END = "<|endoftext|>"
BOTH_ENDS = {"tokenizer_class": "LlamaTokenizer", "bos_token": END, "eos_token": END}


def nothing(folder: Path) -> None:
    """Change no file."""


# A kind of tokenizer, the file, those beside it, the file with their changes in it, and what is
# said to contradict it.
APPLIED = [
    ("bert", CASED, nothing, nothing, LOWER),
    ("bert", CASED, beside(CONFIG, tokenizer_class=None), nothing, LOWER),
    ("bert", nothing, beside(CONFIG, do_lower_case=False), CASED, LOWER),
    ("bert", in_file("normalizer", strip_accents=False), nothing, nothing, ["strip_accents"]),
    (
        "bert", nothing, beside(CONFIG, tokenize_chinese_chars=False),
        in_file("normalizer", handle_chinese_chars=False), ["tokenize_chinese_chars"],
    ),
    ("roberta", SPACE, nothing, nothing, ["add_prefix_space"]),
    ("roberta", nothing, beside(CONFIG, add_prefix_space=True), SPACE, ["add_prefix_space"]),
    (
        "qwen", nothing, beside(CONFIG, **BOTH_ENDS, add_eos_token=True), ends(END),
        ["add_eos_token"],
    ),
    (
        "bert", nothing, beside(MAP, additional_special_tokens=[{"content": "[NEW]"}]),
        with_token(300, content="[NEW]", **PLAIN), ["[NEW]"],
    ),
    (
        "bert", nothing, beside("added_tokens", sea=20),
        with_token(None, content="sea", special=False, normalized=True), ["sea"],
    ),
    (
        "bert", nothing,
        beside(CONFIG, added_tokens_decoder={"300": {"content": "[NEW]", "special": False}}),
        with_token(300, content="[NEW]", special=False, normalized=True), ["[NEW]"],
    ),
    (
        "qwen", nothing, beside(CONFIG, extra_special_tokens={"image": "sea"}),
        with_token(700, content="sea", **PLAIN), ["sea"],
    ),
]  # fmt: skip


def ids_of_file(folder: Path) -> list[list[int]]:
    """Tokenize texts by `tokenizer.json` alone."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [tokenizer.encode(text).ids for text in TEXTS]


def read(folder: Path) -> tuple[TextTokenizer, list[list[int]], list[dict]]:
    """Read the tokenizer of a folder; return the ids of texts, and the contradictions logged."""
    with capture_logs() as logs:
        tokenizer = TextTokenizer.from_folder(folder, 100)
    ids = [text.ids.tolist() for text in tokenizer.encode(TEXTS)]
    return tokenizer, ids, [line for line in logs if line["event"] == "tokenizer_json_contradicted"]


@pytest.mark.parametrize(("kind", "file", "others", "as_file", "members"), APPLIED)
def test_files_beside_tokenizer_json_are_applied_with_a_warning(
    kinds, tmp_path: Path, kind, file: Change, others: Change, as_file: Change, members
) -> None:
    folder = shutil.copytree(kinds[kind], tmp_path / "model")
    change(folder / "config.json", vocab_size=2000)
    as_file(folder)
    expected = ids_of_file(folder)
    shutil.copy(kinds[kind] / "tokenizer.json", folder)
    file(folder)
    in_file = ids_of_file(folder)
    generic = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": None}
    change(folder / "tokenizer_config.json", **generic)
    unchanged, ids, logs = read(folder)
    assert (ids, logs) == (in_file, [])  # This class has no defaults.
    shutil.copy(kinds[kind] / "tokenizer_config.json", folder)
    others(folder)
    tokenizer, ids, logs = read(folder)
    assert ids == expected != in_file
    assert tokenizer.digest != unchanged.digest
    line = logs[0]
    assert (line["members"], line["log_level"]) == (members, "warning")
    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert line["other_ids"] == alone.encode(line["text"]).ids[:12] != line["ids"]


def test_split_special_tokens_is_applied(kinds, tmp_path: Path) -> None:
    folder = shutil.copytree(kinds["bert"], tmp_path / "model")
    beside(CONFIG, split_special_tokens=True)(folder)
    tokenizer, ids, _ = read(folder)
    assert ids == AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"] != ids_of_file(folder)
    assert tokenizer.digest != TextTokenizer.from_folder(kinds["bert"], 100).digest


def test_token_without_an_embedding_is_not_added(kinds, tmp_path: Path) -> None:
    folder = shutil.copytree(kinds["bert"], tmp_path / "model")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    beside(MAP, additional_special_tokens=["[NEW]", "[END]"])(folder)
    assert read(folder)[1] == ids_of_file(folder)
    change(folder / "config.json", vocab_size=size + 1)
    tokenizer, _, (line,) = read(folder)
    assert line["members"] == ["[NEW]"]
    assert tokenizer.token_id("[NEW]") == size
    assert tokenizer.token_id("[END]") is None


def as_bert_without_class(folder: Path) -> None:
    """Make a model of BERT's type that names no class for its tokenizer."""
    change(folder / "config.json", model_type="bert")
    change(folder / "tokenizer_config.json", tokenizer_class=None)


# A kind of tokenizer, and what makes transformers 5 build another one for its class.
CLASSES = [
    # As mmlw-retrieval-roberta, and old revisions of paraphrase-multilingual-MiniLM-L12-v2.
    ("xlm-roberta", beside(CONFIG, tokenizer_class="RobertaTokenizer")),
    ("xlm-roberta", as_bert_without_class),
    ("bert", in_file(post_processor=None)),
    ("bert", in_file(pre_tokenizer={"type": "Whitespace"})),
    ("bert", in_file(normalizer=None, pre_tokenizer={"type": "Digits", "individual_digits": True})),
    ("xlm-roberta", in_file(pre_tokenizer={"type": "Punctuation", "behavior": "Removed"})),
    ("roberta", in_file(post_processor=None)),
    ("qwen", in_file(pre_tokenizer={"type": "Punctuation", "behavior": "Removed"})),
]


@pytest.mark.parametrize(("kind", "apply"), CLASSES)
def test_class_that_transformers_builds_otherwise_is_a_warning_with_ids(
    kinds, tmp_path: Path, kind: str, apply: Change
) -> None:
    folder = shutil.copytree(kinds[kind], tmp_path / "model")
    apply(folder)
    tokenizer, ids, (line,) = read(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids == ids_of_file(folder)
    assert line["members"] == ["tokenizer_class"]
    assert line["log_level"] == "warning"
    assert line["other_ids"] == theirs(line["text"])["input_ids"][:12] != line["ids"]
    assert line["ids"] == tokenizer.encode([line["text"]])[0].ids.tolist()[:12]
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert read(folder)[0].digest == tokenizer.digest  # The ids are those of the file.


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "qwen", "published"])
def test_transformers_is_not_imported_for_usual_tokenizers(
    kinds, kind, tmp_path, monkeypatch
) -> None:
    source = minilm_folder() if kind == "published" else kinds[kind]
    folder = shutil.copytree(source, tmp_path / "model")
    expected = AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    monkeypatch.setitem(sys.modules, "transformers", None)
    for kind_of_class in (config["tokenizer_class"], None, "PreTrainedTokenizerFast"):
        change(folder / "tokenizer_config.json", tokenizer_class=kind_of_class)
        tokenizer, ids, logs = read(folder)
        assert (ids, logs) == (expected, [])
        assert tokenizer.digest == TextTokenizer.from_folder(source, 100).digest


def test_class_that_transformers_cannot_load_is_read_from_the_file(kinds, tmp_path: Path) -> None:
    folder = shutil.copytree(kinds["bert"], tmp_path / "model")
    change(folder / "tokenizer_config.json", tokenizer_class="BertJapaneseTokenizer")
    _, ids, logs = read(folder)
    assert (ids, logs) == (ids_of_file(folder), [])
