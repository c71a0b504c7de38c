"""The steps from states to vectors are those of the configuration, or the start says why not.

What each of them computes is compared with sentence-transformers in
`test_dense`.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from smart_embedder.errors import StartupError
from smart_embedder.models.tasks.pooling import SentenceConfig, Truncation, normalize
from tests.models.checkpoint.test_config import PACKAGE, write

SIZES = {"in_features": 8, "out_features": 4}
WEIGHT, RESIDUAL = torch.rand(4, 8), torch.rand(4, 8)


def write_modules(folder: Path, *modules: tuple[str, str, dict[str, object]]) -> None:
    """A module of each kind in its own folder, with that configuration."""
    entries = [{"type": PACKAGE + kind, "path": path} for kind, path, _ in modules]
    write(folder / "modules.json", entries)
    for kind, path, config in modules:
        if path:
            write(folder / path / "config.json", config)
        if kind == "Dense":
            tensors = {"linear.weight": WEIGHT, "residual.weight": RESIDUAL}
            save_file(tensors | {"linear.bias": torch.ones(4)}, folder / path / "model.safetensors")


def test_the_steps_come_in_the_order_of_the_modules(tmp_path) -> None:
    dense = SIZES | {"bias": False, "activation_function": "torch.nn.Identity"}
    write_modules(
        tmp_path,
        ("Transformer", "", {}),
        ("Pooling", "1_Pooling", {"pooling_mode": ["max", "lasttoken"]}),
        ("Dropout", "2_Dropout", {}),
        ("Dense", "3_Dense", dense),
        ("Normalize", "4_Normalize", {}),
        ("Dense", "5_Dense", SIZES | {"use_residual": True}),
    )
    own = {"truncate_dim": 3, "prompts": {"query": "q: ", "": ""}, "default_prompt_name": "query"}
    write(tmp_path / "config_sentence_transformers.json", own)
    config = SentenceConfig.read(tmp_path)
    assert config.poolings == ("max", "last_token")
    first, second, third, last = config.steps
    assert (second, last) == (normalize, Truncation(3))
    states = torch.randn(2, 8)
    torch.testing.assert_close(first(states), states @ WEIGHT.T)
    torch.testing.assert_close(
        third(states), torch.tanh(states @ WEIGHT.T + 1) + states @ RESIDUAL.T
    )
    assert config.prompts == {"query": "q: ", "": ""}
    assert config.default_prompt == "q: "


def test_a_pooling_in_its_usual_folder_counts_without_a_list_of_modules(tmp_path) -> None:
    assert SentenceConfig.read(tmp_path) == SentenceConfig()
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert SentenceConfig.read(tmp_path).poolings == ("mean",)


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("module", ["Dense", "Normalize"])
def test_what_works_on_something_else_than_the_vector_is_refused(tmp_path, module, kind) -> None:
    names = {f"module_{kind}_name": "sentence_embedding"}
    write_modules(tmp_path, (module, "1_Step", SIZES | names))
    assert len(SentenceConfig.read(tmp_path).steps) == 1
    names[f"module_{kind}_name"] = "token_embeddings"
    write_modules(tmp_path, (module, "1_Step", SIZES | names))
    with pytest.raises(StartupError, match="works on token_embeddings"):
        SentenceConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("activation", "known"),
    [
        ("torch.nn.modules.activation.GELU", True),
        ("torch.nn.modules.linear.Identity", True),
        ("torch.nn.modules.activation.Softmax", False),
        ("own.Tanh", False),
        ("Tanh", False),
    ],
)
def test_only_pytorchs_activations_are_applied(tmp_path, activation, known) -> None:
    write_modules(tmp_path, ("Dense", "1_Dense", SIZES | {"activation_function": activation}))
    if known:
        (layer,) = SentenceConfig.read(tmp_path).steps
        assert type(layer._activation).__name__ == activation.rpartition(".")[2]
    else:
        with pytest.raises(StartupError, match="has the activation"):
            SentenceConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("LSTM", "names the module LSTM; known here: Transformer, Pooling, Dense, Normalize"),
        ("Transformer", "has the transformer in 1_Other, and not beside it"),
    ],
)
def test_modules_that_would_not_be_computed_are_refused(tmp_path, kind, message) -> None:
    write_modules(tmp_path, (kind, "1_Other", {}))
    with pytest.raises(StartupError, match=message):
        SentenceConfig.read(tmp_path)
