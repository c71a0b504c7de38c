"""Reading the steps from states to vectors; `test_dense` compares their results."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from smart_embedder.errors import StartupError
from smart_embedder.models.heads import pooling
from smart_embedder.models.heads.pooling import SentenceConfig
from tests.smart_embedder.models.files.test_config import PACKAGE, write
from tests.support.packed_attention import pack_lengths

SIZES = {"in_features": 8, "out_features": 4}


def write_module(folder: Path, kind: str, config: dict[str, object]) -> None:
    """Write a model with one module of that configuration."""
    write(folder / "modules.json", [{"type": PACKAGE + kind, "path": "1_Module"}])
    write(folder / "1_Module" / "config.json", config)
    if kind == "Dense":
        tensors = {"linear.weight": torch.rand(4, 8), "linear.bias": torch.ones(4)}
        save_file(tensors, folder / "1_Module" / "model.safetensors")


def test_pooling_folder_counts_without_modules_json(tmp_path) -> None:
    assert SentenceConfig.read(tmp_path) == SentenceConfig()
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert SentenceConfig.read(tmp_path).poolings == ("mean",)


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("module", ["Dense", "Normalize"])
def test_module_for_other_features_is_refused(tmp_path, module, kind) -> None:
    names = {f"module_{kind}_name": "sentence_embedding"}
    write_module(tmp_path, module, SIZES | names)
    assert len(SentenceConfig.read(tmp_path).steps) == 1
    names[f"module_{kind}_name"] = "token_embeddings"
    write_module(tmp_path, module, SIZES | names)
    with pytest.raises(StartupError, match="works on token_embeddings"):
        SentenceConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("activation", "supported"),
    [
        ("torch.nn.modules.activation.GELU", True),
        ("torch.nn.modules.linear.Identity", True),
        ("torch.nn.modules.activation.Softmax", False),
        ("own.Tanh", False),
    ],
)
def test_only_activations_of_pytorch_are_applied(tmp_path, activation, supported) -> None:
    write_module(tmp_path, "Dense", SIZES | {"activation_function": activation})
    if supported:
        (layer,) = SentenceConfig.read(tmp_path).steps
        assert type(layer.layers[-1]).__name__ == activation.rpartition(".")[2]
    else:
        with pytest.raises(StartupError, match="has the activation"):
            SentenceConfig.read(tmp_path)


@pytest.mark.parametrize("kind", ["LSTM", "WeightedLayerPooling"])
def test_unsupported_modules_are_refused(tmp_path, kind) -> None:
    write_module(tmp_path, kind, {})
    with pytest.raises(StartupError, match=f"names the module {kind}; supported: Transformer, S"):
        SentenceConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "supported"),
    [
        ("Transformer Pooling Normalize Normalize", True),
        ("Transformer Normalize", True),
        ("Transformer Dropout Pooling Dropout Normalize", True),
        # sentence-transformers accepts this, although Normalize has nothing to scale yet.
        ("Transformer Normalize Pooling", False),
        ("Transformer Pooling Normalize Pooling", False),
        ("Pooling Transformer", False),
    ],
)
def test_modules_in_an_unsupported_order_are_refused(tmp_path, kinds, supported) -> None:
    entries = []
    for index, kind in enumerate(kinds.split()):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        write(tmp_path / path / "config.json", {})
        entries.append({"type": f"sentence_transformers.models.{kind}", "path": path})
    write(tmp_path / "modules.json", entries)
    if supported:
        assert len(SentenceConfig.read(tmp_path).steps) == kinds.count("Normalize")
    else:
        with pytest.raises(StartupError, match="has its modules in the order .*; supported: T"):
            SentenceConfig.read(tmp_path)


@pytest.mark.parametrize("operation", ["mean", "max"])
def test_pooling_without_segment_reduce_gives_the_same_results(operation: str) -> None:
    torch.manual_seed(0)
    packed, hidden = pack_lengths([3, 1, 7]), torch.randn(11, 8).half()
    expected = pooling._reduce(hidden, packed, operation)
    actual = pooling.reduce_each_sequence(hidden, packed, operation)
    torch.testing.assert_close(actual, expected)
