"""How ColBERT models read texts, by the files of three packages, and what is refused."""

import json
import string
from pathlib import Path
from typing import Any

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.models.tasks.colbert import (
    ColbertConfig,
    Expansion,
    Reading,
    is_colbert,
    read_colbert_config,
    special_token,
)

PUNCTUATION = list(string.punctuation)
PYLATE = ["Transformer", "Dense"]
MASKED = ["Transformer", "Dense", "Normalize", "MultiVectorMask"]


def folder_with(folder: Path, modules: list[str], **files: dict[str, Any]) -> Path:
    """`files` by their names without `.json`; those of the mask are of its own folder."""
    (folder / "config.json").write_text("{}")
    if modules:
        described = [
            {
                "type": f"sentence_transformers.models.{kind}",
                "path": "" if kind == "Transformer" else kind,
            }
            for kind in modules
        ]
        (folder / "modules.json").write_text(json.dumps(described))
    for name, content in files.items():
        path = {"metadata": "artifact.metadata", "mask": "MultiVectorMask/config.json"}.get(name)
        target = folder / (path or f"{name}.json")
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("modules", "architectures", "expected"),
    [
        (PYLATE, None, True),
        (MASKED, None, True),
        (["Transformer", "MultiVectorMask", "Pooling"], None, True),
        (["Transformer", "Pooling", "Dense"], None, False),
        (["Transformer", "Pooling"], ["HF_ColBERT"], False),
        (["Transformer"], ["HF_ColBERT"], False),
        ([], ["HF_ColBERT"], True),
        ([], ["BertModel"], False),
        ([], None, False),
    ],
)
def test_a_model_of_vectors_of_tokens_is_told_by_its_modules_or_its_architecture(
    tmp_path: Path, modules, architectures, expected
) -> None:
    folder_with(tmp_path, modules, config={"architectures": architectures})
    assert is_colbert(tmp_path) == expected


PYLATE_CONFIGS = [
    (
        {},
        ColbertConfig(
            Reading("[Q] ", length=32),
            Reading("[D] ", length=180),
            Expansion(32, attended=False),
            PUNCTUATION,
            skips_unknown=True,
        ),
    ),
    (
        {
            "query_prefix": "q",
            "document_prefix": "",
            "query_length": 48,
            "document_length": 300,
            "attend_to_expansion_tokens": True,
            "skiplist_words": ["the"],
        },
        ColbertConfig(
            Reading("q", length=48),
            Reading("", length=300),
            Expansion(48, attended=True),
            ["the"],
            skips_unknown=True,
        ),
    ),
    (
        {"do_query_expansion": False, "skiplist_words": []},
        ColbertConfig(
            Reading("[Q] ", length=32), Reading("[D] ", length=180), None, [], skips_unknown=True
        ),
    ),
]


@pytest.mark.parametrize(("config", "expected"), PYLATE_CONFIGS)
def test_pylates_configuration_has_pylates_defaults(tmp_path: Path, config, expected) -> None:
    folder_with(tmp_path, PYLATE, config_sentence_transformers=config)
    assert read_colbert_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {},
            ColbertConfig(
                Reading("[unused0]", length=32),
                Reading("[unused1]", length=180),
                Expansion(32, attended=False),
                PUNCTUATION,
                skips_unknown=True,
            ),
        ),
        (
            {
                "query_token_id": "[Q]",
                "doc_token_id": "[D]",
                "query_maxlen": 20,
                "doc_maxlen": 70,
                "mask_punctuation": False,
                "attend_to_mask_tokens": True,
            },
            ColbertConfig(
                Reading("[Q]", length=20),
                Reading("[D]", length=70),
                Expansion(20, attended=True),
                [],
                skips_unknown=True,
            ),
        ),
    ],
)
def test_stanfords_metadata_has_stanfords_markers(tmp_path: Path, metadata, expected) -> None:
    folder_with(tmp_path, [], metadata=metadata)
    assert read_colbert_config(tmp_path) == expected


FIXED = {"strategy": "fixed"}


@pytest.mark.parametrize(
    ("texts", "mask", "prompts", "expected"),
    [
        (
            {},
            {},
            {},
            ColbertConfig(Reading(), Reading(), None, [], skips_unknown=False),
        ),
        (
            {"max_seq_length": 99, "query_length": 20, "document_length": 200},
            {"skiplist_words": [".", ","]},
            {"query": "q: ", "passage": "p: ", "corpus": "c: "},
            ColbertConfig(
                Reading(prompt="q: ", length=20),
                Reading(prompt="p: ", length=200),
                None,
                [".", ","],
                skips_unknown=False,
            ),
        ),
        (
            {"max_seq_length": 99, "query_length": 20, "query_expansion": FIXED},
            {"skiplist_words": ["."], "skiplist_tasks": []},
            {"document": "d: ", "passage": "p: "},
            ColbertConfig(
                Reading(length=32),
                Reading(prompt="d: ", length=99),
                Expansion(32, attended=False),
                [],
                skips_unknown=False,
            ),
        ),
        (
            {"query_expansion": FIXED | {"length": 24, "attend": True, "token": "[X]"}},
            {"skiplist_words": ["."], "skiplist_tasks": "document"},
            {"corpus": "c: ", "query": None},
            ColbertConfig(
                Reading(length=24),
                Reading(prompt="c: "),
                Expansion(24, attended=True, token="[X]"),
                ["."],
                skips_unknown=False,
            ),
        ),
    ],
)
def test_sentence_transformers_configuration_is_spread_over_four_files(
    tmp_path: Path, texts, mask, prompts, expected
) -> None:
    folder_with(
        tmp_path,
        MASKED,
        sentence_bert_config=texts,
        mask=mask,
        config_sentence_transformers={"prompts": prompts},
    )
    assert read_colbert_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        (
            [*MASKED[:3], "WeightedLayerPooling"],
            {},
            "names the module WeightedLayerPooling; known here: Transformer, Dense, MultiVector",
        ),
        (["Transformer", "Dense", "MultiVectorMask"], {}, "does not end in Normalize"),
        (["Transformer", "Normalize", "Dense", "MultiVectorMask"], {}, "does not end in Normalize"),
        (MASKED, {"mask": {"keep_only_token_ids": [1]}}, "leaves out other tokens than some of"),
        (MASKED, {"mask": {"skiplist_tasks": ["query", "document"]}}, "leaves out other tokens"),
        (
            MASKED,
            {"sentence_bert_config": {"query_expansion": {"strategy": "longest"}}},
            "expands queries by the strategy longest; known here: fixed",
        ),
        *(
            (PYLATE, {"config_sentence_transformers": {name: value}}, f"no usable {name}: {value}")
            for name in ("query_length", "document_length")
            for value in (0, -1, 2**31, 1.5, "32", True)
        ),
        ([], {"metadata": {"query_maxlen": 0}}, "no usable query_maxlen: 0"),
        ([], {"metadata": {"doc_maxlen": 0}}, "no usable doc_maxlen: 0"),
    ],
)
def test_what_is_not_known_here_is_named(tmp_path: Path, modules, files, message: str) -> None:
    folder_with(tmp_path, modules, **files)
    with pytest.raises(StartupError, match=message):
        read_colbert_config(tmp_path)


def test_the_longest_length_and_the_shortest_are_lengths(tmp_path: Path) -> None:
    config = {"query_length": 1, "document_length": 2**31 - 1}
    read = read_colbert_config(folder_with(tmp_path, PYLATE, config_sentence_transformers=config))
    assert (read.query.length, read.document.length) == (1, 2**31 - 1)


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "expected"),
    [
        ({"mask_token": "[M]"}, {"mask_token": "[N]"}, "[M]"),
        ({"mask_token": {"content": "[M]"}}, {}, "[M]"),
        ({"mask_token": None}, {"mask_token": "[N]"}, "[N]"),
        ({}, {"mask_token": {"content": "[N]"}}, "[N]"),
        ({"mask_token": {}}, {"eos_token": "[E]"}, None),
    ],
)
def test_a_special_token_is_named_in_either_file(tmp_path, tokenizer, tokens, expected) -> None:
    folder_with(tmp_path, [], tokenizer_config=tokenizer, special_tokens_map=tokens)
    assert special_token(tmp_path, "mask_token") == expected
