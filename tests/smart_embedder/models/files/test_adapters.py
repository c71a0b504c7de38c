"""LoRA adapters, compared with peft under sentence-transformers."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder

from smart_embedder.errors import StartupError
from smart_embedder.interface import DownloadStatus
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.loader import load_embedder, locate_model
from smart_embedder.settings import EngineSettings
from tests.support.checkpoints import save_qwen
from tests.support.encoders import (
    TEXTS,
    assert_close,
    embed,
    float32,
    load,
    load_scorer,
    reference,
    reference_scores,
    reference_vectors,
    save_family,
    save_modules,
    score,
    word_tokenizer,
)
from tests.support.wordpiece import change, save_model


def located(folder: Path) -> Path:
    """Find the folder of a model as the service does."""
    return locate_model(str(folder), None, EngineSettings(), DownloadStatus())


def save_adapter(model: Any, folder: Path, **options: Any) -> Path:
    """Add a LoRA with random weights to a model of sentence-transformers, and save it."""
    torch.manual_seed(8)
    model.add_adapter(LoraConfig(r=4, lora_alpha=6, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder))
    assert not (folder / "model.safetensors").exists()
    return folder


BY_PATTERN = {"use_rslora": True, "rank_pattern": {".*0.*": 2}, "alpha_pattern": {".*0.*": 9}}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {"target_modules": ["query", "value", "output.dense"]} | BY_PATTERN),
        ("modernbert", {"target_modules": ["Wqkv", "Wo"]}),
        ("qwen3-bidirectional", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    ],
)
def test_lora_adapter_equals_sentence_transformers(family, options, tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", family, word_tokenizer())
    folder = save_adapter(reference(base), tmp_path / "lora", **options)
    ours = load(located(folder))
    assert_close(embed(ours, TEXTS), reference_vectors(folder, TEXTS))
    without = load(base)
    assert np.abs(embed(ours, TEXTS) - embed(without, TEXTS)).max() > 1e-2
    assert ours.spaces["dense"] != without.spaces["dense"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_family(tmp_path_factory.mktemp("adapters") / "base", "bert", word_tokenizer())


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory) -> Path:
    """An adapter that is not changed; tests change a copy of it."""
    folder = tmp_path_factory.mktemp("saved") / "lora"
    return save_adapter(reference(base), folder, target_modules=["query"])


@pytest.fixture
def lora(saved: Path, tmp_path: Path) -> Path:
    return copytree(saved, tmp_path / "lora")


def test_adapter_of_qwen3_embedding_follows_its_modules(tmp_path: Path) -> None:
    """The published model leaves scaling to requests, a model that was trained further does not."""
    base = save_qwen(tmp_path / "base")
    prompts = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}
    pooling = {"pooling_mode": "lasttoken"}
    save_modules(base, pooling, [("Normalize", {}, None)], prompts={"prompts": prompts})
    assert not load(base).normalizes
    folder = save_adapter(reference(base), tmp_path / "lora", target_modules=["q_proj"])
    ours = load(located(folder))
    assert ours.normalizes
    assert_close(embed(ours, TEXTS), reference_vectors(folder, TEXTS))


def test_base_model_of_an_adapter_is_found_by_its_hub_id(
    base: Path, lora: Path, tmp_path: Path
) -> None:
    expected = embed(load(located(lora)), TEXTS)
    cached = tmp_path / "hub" / "models--org--base"
    copytree(base, cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "tuned").write_text("a" * 40)
    change(lora / "adapter_config.json", base_model_name_or_path="org/base", revision="tuned")
    settings = EngineSettings(hf_home=tmp_path, hf_hub_offline=True)
    found = locate_model(str(lora), None, settings, DownloadStatus())
    assert_close(embed(load(found), TEXTS), expected)


def test_temporary_folder_that_cannot_be_written_is_named(
    lora: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StartupError, match="set TMPDIR to a folder that can be written to"):
        located(lora)


def test_classifier_saved_with_an_adapter_is_read(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", transformers.BertForSequenceClassification, num_labels=1)
    model = CrossEncoder(str(base), device="cpu")
    folder = save_adapter(
        model, tmp_path / "lora", target_modules=["query"], modules_to_save=["classifier"]
    )
    with changed_tensors(folder) as tensors:
        (name,) = (name for name in tensors if name.endswith("classifier.weight"))
        tensors[name] += 1
    ours = load_scorer(located(folder), 64)
    passages = [text for text in TEXTS if len(text) < 100]  # The reference cuts otherwise.
    expected = reference_scores(folder, "hybrid search", passages)
    assert_close(score(ours, "hybrid search", passages), expected)


@contextmanager
def changed_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Let a test change the tensors of an adapter."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path)


def with_magnitudes(folder: Path) -> None:
    with changed_tensors(folder) as tensors:
        tensors["base_model.model.encoder.layer.0.lora_magnitude_vector"] = torch.ones(3)


def of_another_model(folder: Path) -> None:
    with changed_tensors(folder) as tensors:
        for name in [*tensors]:
            tensors[name.replace("encoder.layer.0", "encoder.layer.7")] = tensors.pop(name)


def of_one_row(folder: Path) -> None:
    with changed_tensors(folder) as tensors:
        (second,) = (name for name in tensors if "0.attention.self.query.lora_B" in name)
        tensors[second] = tensors[second][:1].clone()


def of_another_rank(folder: Path) -> None:
    with changed_tensors(folder) as tensors:
        (second,) = (name for name in tensors if "0.attention.self.query.lora_B" in name)
        tensors[second] = tensors[second][:, :3].clone()


def in_8_bits(folder: Path) -> None:
    with changed_tensors(folder) as tensors:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.int8)


def of_an_adapter(folder: Path) -> None:
    base = copytree(folder, folder.parent / "chained")
    change(folder / "adapter_config.json", base_model_name_or_path=str(base))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"use_dora": True}, "an adapter with use_dora, and only plain LoRA is supported"),
        ({"peft_type": "IA3"}, "an adapter with peft_type IA3"),
        ({"init_lora_weights": "pissa"}, "an adapter with init_lora_weights pissa"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "/no/model"}, "the model folder /no/model does not exist"),
        ({"base_model_name_or_path": "/"}, "an adapter for /, which holds no config.json"),
        ({"revision": 3}, "lora/adapter_config.json has no usable revision: 3"),
        ({"lora_alpha": math.inf}, "has no usable lora_alpha or alpha_pattern: inf"),
        ({"alpha_pattern": {"query": None}}, "has no usable lora_alpha or alpha_pattern: None"),
        ({"alpha_pattern": {"(": 8}}, r"has no usable alpha_pattern: {'\(': 8}"),
        ({"alpha_pattern": [8]}, r"has no usable alpha_pattern: \[8\]"),
        (of_one_row, r"adapter of \[1, 4\] and \[4, 64\] for .*query, which has \[64, 64\] in"),
        (of_another_rank, r"adapter of \[64, 3\] and \[4, 64\] for .*query, which has \[64, 64\]"),
        (in_8_bits, "in int8; take one in float32"),
        (with_magnitudes, "lora_magnitude_vector, and only LoRA of linear layers"),
        (of_another_model, r"encoder.layer.7.\S+, and its base model has no tensors of this name"),
        (of_an_adapter, "which is an adapter, too"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safet"),
    ],
)
def test_adapters_of_other_forms_are_refused(spoil, message, lora: Path) -> None:
    if callable(spoil):
        spoil(lora)
    else:
        change(lora / "adapter_config.json", **spoil)
    with pytest.raises(StartupError, match=message):
        load_embedder("m", located(lora), 64, float32())
