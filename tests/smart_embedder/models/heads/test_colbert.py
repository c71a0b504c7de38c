"""ColBERT vectors, compared with `MultiVectorEncoder` on the same files."""

import json
import string
from dataclasses import astuple
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    BertModel,
    ModernBertModel,
    MPNetModel,
    Qwen3Model,
    XLMRobertaModel,
)

from smart_embedder.errors import StartupError
from smart_embedder.models.heads.colbert import (
    ColbertEmbedder,
    is_colbert,
    read_colbert_config,
    read_special_token,
)
from smart_embedder.requests import Outputs, TruncationOptions
from smart_embedder.results import TextEmbedding
from tests.support.checkpoints import changed_weights
from tests.support.wordpiece import (
    MODERNBERT,
    MPNET,
    ROBERTA,
    change,
    save_colbert,
)

COLBERT = Outputs(colbert=True)
TEXTS = [
    *["hybrid search", "memory, rank! (sea)", "", "rank " * 100, "!?", "unknown жизнь"],
    *["search sea " * length for length in (1, 5, 9, 30)],
]
GROUPED = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
EXPANSIONS = {
    "unattended": {},
    "attended": {"attend_to_expansion_tokens": True},
    "none": {"do_query_expansion": False},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_reranker: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("colbert")
    markers = {"query_prefix": "▁search", "document_prefix": "▁rank"}
    models = {name: (BertModel, changes) for name, changes in EXPANSIONS.items()}
    models["qwen3"] = Qwen3Model, GROUPED
    models["xlm-roberta"] = XLMRobertaModel, ROBERTA | markers | {"tokenizer_of": tiny_reranker}
    models["modernbert"] = ModernBertModel, MODERNBERT
    models["mpnet"] = MPNetModel, MPNET
    return {
        name: save_colbert(root / name, kind, **changes) for name, (kind, changes) in models.items()
    }


@pytest.fixture(scope="module")
def model(folders, load) -> ColbertEmbedder:
    return load(folders["unattended"])


def ids_of(model: ColbertEmbedder, texts: list[str], input_type: str | None) -> list[np.ndarray]:
    return [text.ids for text in model.tokenize(texts, input_type=input_type)]


def assert_vectors(results: list[TextEmbedding], expected: list[np.ndarray]) -> None:
    for result, vectors in zip(results, expected, strict=True):
        assert result.colbert.shape == vectors.shape
        np.testing.assert_allclose(result.colbert, vectors, rtol=0, atol=1e-5)


def reference(folder: Path, texts: list[str]) -> dict[str, list[np.ndarray]]:
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    encoders = {"query": theirs.encode_query, "document": theirs.encode_document}
    return {side: encode(texts, convert_to_numpy=True) for side, encode in encoders.items()}


def assert_like_theirs(model: ColbertEmbedder, folder: Path, texts: list[str] = TEXTS) -> None:
    for input_type, expected in reference(folder, texts).items():
        assert_vectors(model.forward(ids_of(model, texts, input_type), COLBERT), expected)


@pytest.mark.parametrize("name", ["unattended", "attended", "modernbert", "mpnet", "qwen3"])
def test_colbert_queries_and_documents_equal_sentence_transformers(folders, load, name) -> None:
    model = load(folders[name])
    theirs = reference(folders[name], TEXTS)
    both = ids_of(model, TEXTS, "query") + ids_of(model, TEXTS, "document")
    order = np.random.default_rng(0).permutation(len(both))
    results = model.forward([both[index] for index in order], COLBERT)
    assert_vectors(
        [results[index] for index in np.argsort(order)], theirs["query"] + theirs["document"]
    )


def test_roberta_expansion_tokens_have_positions(folders, load) -> None:
    model, plain = load(folders["xlm-roberta"]), ["hybrid search", "vector " * 3, "sea " * 40]
    tokenizer = AutoTokenizer.from_pretrained(folders["xlm-roberta"])
    encoder = XLMRobertaModel.from_pretrained(folders["xlm-roberta"]).eval()
    projection = load_file(folders["xlm-roberta"] / "1_Dense" / "model.safetensors")
    for text, ids in zip(plain, ids_of(model, plain, "query"), strict=True):
        plain_ids = tokenizer(text, truncation=True, max_length=23)["input_ids"]
        plain_ids.insert(1, tokenizer.convert_tokens_to_ids("▁search"))
        missing = 24 - len(plain_ids)
        expanded = [*plain_ids, *[tokenizer.mask_token_id] * missing]
        mask = [1] * len(plain_ids) + [0] * missing
        with torch.inference_mode():
            states = encoder(torch.tensor([expanded]), torch.tensor([mask])).last_hidden_state[0]
            vectors = torch.nn.functional.normalize(states @ projection["linear.weight"].T)
        assert_vectors(model.forward([ids], COLBERT), [vectors.numpy()])


def test_punctuation_of_documents_has_no_colbert_vector(
    model: ColbertEmbedder,
) -> None:
    (query,) = ids_of(model, ["memory, rank!"], "query")
    (document,) = ids_of(model, ["memory, rank!"], None)
    named = model.token_strings(model.colbert_tokens(document))
    assert named == ["[CLS]", "[unused1]", "memory", "rank", "[SEP]"]
    (result,) = model.forward([document], COLBERT)
    assert len(result.colbert) == len(named)
    named = model.token_strings(model.colbert_tokens(query))
    read = ["[CLS]", "[unused0]", "memory", ",", "rank", "!", "[SEP]"]
    assert named == read + ["[MASK]"] * (24 - len(read))


def test_truncation_to_the_lengths_of_queries_and_documents(model: ColbertEmbedder) -> None:
    long = "rank " * 100
    for input_type, most in (("query", 24), ("document", 50), (None, 50)):
        (text,) = model.tokenize([long], input_type=input_type)
        assert (len(text.ids), text.original_tokens, text.truncated) == (most, 103, True)
    (left,) = model.tokenize(["sea " + long], truncation=TruncationOptions(side="left"))
    assert model.token_strings(model.colbert_tokens(left.ids))[:3] == ["[CLS]", "[unused1]", "rank"]
    (short,) = model.tokenize(["sea"], input_type="query")
    assert (len(short.ids), short.original_tokens, short.truncated) == (24, 24, False)


def test_truncation_to_the_tokenizers_limit_without_lengths_by_type(
    folders, load, tmp_path: Path
) -> None:
    MultiVectorEncoder(str(folders["none"]), device="cpu").save_pretrained(str(tmp_path))
    unset = dict.fromkeys(("query_length", "document_length", "query_expansion"))
    change(tmp_path / "sentence_bert_config.json", **unset)
    change(tmp_path / "tokenizer_config.json", model_max_length=40)
    model = load(tmp_path)
    assert model.max_length == 40
    assert_like_theirs(model, tmp_path)


def test_query_expansion_falls_back_to_eos_token(folders, load, tmp_path: Path) -> None:
    folder = copytree(folders["qwen3"], tmp_path / "copy")
    change(folder / "tokenizer_config.json", mask_token=None, eos_token="[SEP]")
    model = load(folder)
    (text,) = ids_of(model, ["memory"], "query")
    eos = AutoTokenizer.from_pretrained(folder).eos_token
    assert model.token_strings(model.colbert_tokens(text))[-1] == eos


def test_query_expansion_on_the_left_is_refused(folders, load, tmp_path: Path) -> None:
    folder = copytree(folders["qwen3"], tmp_path / "copy")
    message = "pads texts on the left, and queries can only be filled up"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    for side in (None, "left"):
        change(folder / "tokenizer_config.json", padding_side=side)
        with pytest.raises(StartupError, match=message):
            load(folder)
    change(folder / "config_sentence_transformers.json", do_query_expansion=False)
    assert_like_theirs(load(folder), folder)


def test_stanford_colbert_checkpoints_are_read(folders, load, tmp_path: Path) -> None:
    folder = copytree(folders["unattended"], tmp_path / "copy")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    change(folder / "config.json", architectures=["HF_ColBERT"])
    with changed_weights(folder) as weights:
        for name in [*weights]:
            weights[f"bert.{name}"] = weights.pop(name)
        weights["linear.weight"] = torch.randn(16, 64)
    metadata = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 24}
    metadata |= {"doc_maxlen": 50, "mask_punctuation": True, "attend_to_mask_tokens": False}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    assert_like_theirs(load(folder), folder)


OWN = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("family", "file", "changes", "message"),
    [
        ("none", OWN, {"query_prefix": "[Q] "}, "lacks the marker"),
        ("none", OWN, {"document_length": 3}, "leaves no room for text"),
        ("none", "1_Dense/config.json", {"in_features": 63}, "another shape for .* linear.weight"),
        ("none", "1_Dense/config.json", {"activation_function": "os.system"}, "system; supported"),
        (
            "modernbert", "config.json", {"local_attention": 32},
            "padded to 24 tokens, which is more than the model's attention window",
        ),
    ],
)  # fmt: skip
def test_invalid_colbert_models_are_refused(
    folders, load, tmp_path, family, file, changes, message
) -> None:
    folder = copytree(folders[family], tmp_path / "copy")
    change(folder / file, **changes)
    with pytest.raises(StartupError, match=message):
        load(folder)


PUNCTUATION = list(string.punctuation)
PYLATE = ["Transformer", "Dense"]
MASKED = ["Transformer", "Dense", "Normalize", "MultiVectorMask"]


def folder_with(folder: Path, modules: list[str], **files: dict[str, Any]) -> Path:
    """Write `files` by their names without `.json`; `mask` goes to the folder of that module."""
    named = {"metadata": "artifact.metadata", "mask": "MultiVectorMask/config.json"}
    (folder / "config.json").write_text("{}")
    if modules:
        kinds = {kind: "" if kind == "Transformer" else kind for kind in modules}
        package = "sentence_transformers.models."
        entries = [{"type": package + kind, "path": path} for kind, path in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(entries))
    for name, content in files.items():
        target = folder / named.get(name, f"{name}.json")
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("modules", "architecture", "expected"),
    [
        (PYLATE, None, True),
        (["Transformer", "MultiVectorMask", "Pooling"], None, True),
        (["Transformer", "Pooling", "Dense"], "HF_ColBERT", False),
        ([], "HF_ColBERT", True),
        ([], "BertModel", False),
    ],
)
def test_colbert_is_detected_by_modules_or_architecture(
    tmp_path: Path, modules, architecture, expected
) -> None:
    folder_with(tmp_path, modules, config={"architectures": architecture and [architecture]})
    assert is_colbert(tmp_path) == expected


Q, D, FILLED = ("[Q] ", "", 32), ("[D] ", "", 180), (32, False, None)
FIXED = {"strategy": "fixed"}


def pylate(given: dict[str, Any], *expected: Any) -> tuple[Any, ...]:
    return PYLATE, {"config_sentence_transformers": given}, (*expected, True)


def stanford(given: dict[str, Any], *expected: Any) -> tuple[Any, ...]:
    return [], {"metadata": given}, (*expected, True)


def masked(texts: Any, mask: Any, prompts: Any, *expected: Any) -> tuple[Any, ...]:
    named = {"config_sentence_transformers": {"prompts": prompts}}
    return MASKED, named | {"sentence_bert_config": texts, "mask": mask}, (*expected, False)


# The configuration, and expected: marker, prompt and length of queries, the same of documents, the
# expansion, and the skipped words.
CONFIGS = [
    pylate({}, Q, D, FILLED, PUNCTUATION),
    pylate({"do_query_expansion": False, "skiplist_words": ["the"]}, Q, D, None, ["the"]),
    stanford({}, ("[unused0]", "", 32), ("[unused1]", "", 180), FILLED, PUNCTUATION),
    stanford(
        {"mask_punctuation": False, "attend_to_mask_tokens": True},
        *(("[unused0]", "", 32), ("[unused1]", "", 180), (32, True, None), []),
    ),
    masked({}, {}, {}, ("", "", None), ("", "", None), None, []),
    masked(
        {"max_seq_length": 99, "query_length": 20, "document_length": 200},
        {"skiplist_words": [".", ","]},
        {"query": "q: ", "passage": "p: ", "corpus": "c: "},
        *(("", "q: ", 20), ("", "p: ", 200), None, [".", ","]),
    ),
    masked(
        {"max_seq_length": 99, "query_length": 20, "query_expansion": FIXED},
        {"skiplist_words": ["."], "skiplist_tasks": []},
        {"document": "d: ", "passage": "p: "},
        *(("", "", 32), ("", "d: ", 99), FILLED, []),
    ),
    masked(
        {"query_expansion": FIXED | {"length": 24, "attend": True, "token": "[X]"}},
        {"skiplist_words": ["."], "skiplist_tasks": "document"},
        {"corpus": "c: ", "query": None},
        *(("", "", 24), ("", "c: ", None), (24, True, "[X]"), ["."]),
    ),
]


@pytest.mark.parametrize(("modules", "files", "expected"), CONFIGS)
def test_colbert_configurations_of_three_packages_are_read(
    tmp_path: Path, modules, files, expected
) -> None:
    folder_with(tmp_path, modules, **files)
    assert astuple(read_colbert_config(tmp_path)) == expected


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        (
            [*MASKED[:3], "WeightedLayerPooling"],
            {},
            "names the module WeightedLayerPooling; supported: Transformer, Dense, MultiVector",
        ),
        (["Transformer", "Dense", "MultiVectorMask"], {}, "does not end in Normalize"),
        (["Transformer", "Normalize", "Dense", "MultiVectorMask"], {}, "does not end in Normalize"),
        (
            MASKED,
            {"Normalize/config": {"module_input_name": "sentence_embedding"}},
            "Normalize works on sentence_embedding; supported here: token_embeddings",
        ),
        (MASKED, {"mask": {"keep_only_token_ids": [1]}}, "keeps only some tokens"),
        (
            MASKED,
            {"mask": {"skiplist_tasks": ["query", "document"]}},
            "leaves out tokens of q",
        ),
        (
            MASKED,
            {"sentence_bert_config": {"query_expansion": {"strategy": "longest"}}},
            "expands queries by the strategy longest; supported: fixed",
        ),
        *(
            (PYLATE, {"config_sentence_transformers": {name: 0}}, f"no usable {name}: 0")
            for name in ("query_length", "document_length")
        ),
        (PYLATE, {"config_sentence_transformers": {"skiplist_words": "the"}}, "no usable skip"),
        (MASKED, {"mask": {"skiplist_words": [["the"]]}}, "no usable skiplist_words"),
        *(
            (PYLATE, {"config_sentence_transformers": {name: [1]}}, f"no usable {name}: .1.")
            for name in ("query_prefix", "document_prefix")
        ),
        (MASKED, {"mask": {"skiplist_tasks": 5}}, "no usable skiplist_tasks: 5"),
        *(
            (MASKED, {"sentence_bert_config": {"query_expansion": value}}, "no usable query_exp")
            for value in ("fixed", FIXED | {"token": 5})
        ),
        (MASKED, {"config_sentence_transformers": {"prompts": [1]}}, "no usable prompts"),
        ([], {"metadata": {"query_maxlen": 0}}, "no usable query_maxlen: 0"),
    ],
)
def test_unsupported_colbert_configurations_are_refused(
    tmp_path: Path, modules, files, message: str
) -> None:
    folder_with(tmp_path, modules, **files)
    with pytest.raises(StartupError, match=message):
        read_colbert_config(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "expected"),
    [
        ({"mask_token": {"content": "[M]"}}, {"mask_token": "[N]"}, "[M]"),
        ({"mask_token": None}, {"mask_token": "[N]"}, "[N]"),
        ({"mask_token": {}}, {"eos_token": "[E]"}, None),
    ],
)
def test_special_token_is_found_in_either_file(tmp_path, tokenizer, tokens, expected) -> None:
    folder_with(tmp_path, [], tokenizer_config=tokenizer, special_tokens_map=tokens)
    assert read_special_token(tmp_path, "mask_token") == expected
