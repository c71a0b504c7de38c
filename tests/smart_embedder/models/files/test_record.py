"""Nothing of a model's files is ignored in silence: tensors are refused, and fields are logged."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs
from transformers import AutoConfig

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import read_config
from smart_embedder.models.files.record import record_reading
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.loader import load_embedder
from tests.support.checkpoints import changed_json, changed_weights, save_qwen
from tests.support.encoders import (
    dense,
    float32,
    load_scorer,
    save_family,
    save_modules,
    word_tokenizer,
)


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense encoder, computed by our own layers or by transformers."""
    folder = tmp_path_factory.mktemp("record") / request.param
    return save_family(folder, request.param, word_tokenizer())


WITHOUT_EFFECT = [
    *["embeddings.position_ids", "bert.pooler.dense.weight", "cls.predictions.bias"],
    *["lm_head.decoder.weight", "classifier.weight"],
]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("linear.weight", (32, 64), r"the tensor linear\.weight \(32 x 64\), which this model"),
        ("layers.7.extra", (), r"the tensor layers\.7\.extra \(one number\), which"),
        (None, (), ""),
    ],
)
def test_tensor_that_is_not_computed_stops_the_start(
    encoder: Path, tmp_path: Path, name, shape, message
) -> None:
    folder = shutil.copytree(encoder, tmp_path / "copy")
    with changed_weights(folder) as tensors:
        tensors |= {other: torch.zeros(2, 4) for other in WITHOUT_EFFECT}
        if name is not None:
            tensors[name] = torch.zeros(shape)
    with nullcontext() if name is None else pytest.raises(StartupError, match=message):
        load_embedder("model", folder, 64, float32())


def test_tensors_of_heads_are_accounted_for(
    encoder: Path, tiny_m3: Path, tiny_reranker: Path, tmp_path: Path
) -> None:
    projected = shutil.copytree(encoder, tmp_path / "projected")
    save_modules(projected, further=[dense(32, "Tanh")])
    path = projected / "2_Dense" / "pytorch_model.bin"
    torch.save(torch.load(path) | {"scale": torch.ones(3)}, path)
    m3 = shutil.copytree(tiny_m3, tmp_path / "m3")
    path = m3 / "sparse_linear.pt"
    torch.save(torch.load(path) | {"second.weight": torch.ones(1, 3)}, path)
    reranker = shutil.copytree(tiny_reranker, tmp_path / "reranker")
    with changed_weights(reranker) as tensors:
        tensors["second.out_proj.weight"] = torch.ones(1, 3)
    with pytest.raises(StartupError, match=r"2_Dense has the tensor scale \(3\), "):
        load_embedder("model", projected, 64, float32())
    with pytest.raises(StartupError, match=r"m3 has the tensor second\.weight \(1 x 3\), "):
        load_embedder("model", m3, 64, float32())
    with pytest.raises(StartupError, match=r"has the tensor second\.out_proj\.weight \(1 x 3\), "):
        load_scorer(reranker, 64)


def test_first_unread_tensor_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    names = ("a.weight", "b.weight", "c.weight", "pooler.weight")
    save_file({name: torch.ones(2, 3) for name in names}, tmp_path / "model.safetensors")
    with record_reading(tmp_path, tmp_path) as record:
        weights = Weights.read(tmp_path)
        weights.get("b.weight", 2, 3)
        with pytest.raises(
            StartupError, match=r"has the tensor a\.weight \(2 x 3\), and 1 more, which"
        ):
            record.require_all_read()
        weights.row("a.weight", 1)
        record.leave_out([r"^c\."])
    record.require_all_read()


def logged_fields(folder: Path, **changes: Any) -> list[str]:
    with changed_json(folder / "config.json") as config:
        config.update(changes)
    with capture_logs() as logs:
        load_embedder("model", folder, 64, float32())
    found = [log["fields"] for log in logs if log["event"] == "config_fields_not_read"]
    return found[0] if found else []


@pytest.mark.parametrize("family", ["bert", "camembert", "qwen3"])
def test_every_field_of_our_own_families_is_read_or_has_no_effect(
    family: str, tmp_path: Path
) -> None:
    """The fields are all of transformers' configuration, with its defaults."""
    folder = tmp_path / "model"
    if family == "qwen3":
        save_qwen(folder)
    else:
        save_family(folder, family, word_tokenizer())
    config = AutoConfig.from_pretrained(folder).to_dict()
    assert len(config) > 30
    assert logged_fields(folder, **config) == []
    older = {"rope_theta": 1e6, "rope_scaling": None} if family == "qwen3" else {}
    assert logged_fields(folder, torch_dtype="bfloat16", **older) == []
    found = logged_fields(folder, own_scale=2, another=None)
    assert found == ["another", "own_scale"]


@pytest.mark.parametrize("family", ["modernbert", "t5"])
def test_field_that_transformers_does_not_read_is_logged(family: str, tmp_path: Path) -> None:
    """Some fields of T5 are known to the model's code, but not to the configuration's class."""
    folder = save_family(tmp_path / "model", family, word_tokenizer())
    config = AutoConfig.from_pretrained(folder).to_dict()
    published = {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "n_positions": 512}
    assert logged_fields(folder, **config | published) == []
    assert logged_fields(folder, own_scale=2, another=None) == ["own_scale"]


def test_fields_are_recorded_however_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "b": 2, "c": 3, "d": 4}')
    with record_reading(tmp_path, tmp_path) as record, capture_logs() as logs:
        config = read_config(tmp_path)
        assert (config["a"], config.get("b"), "c" in config) == (1, 2, True)
        record.require_all_read()
    assert [log["fields"] for log in logs] == [["d"]]
