"""Parts of transformers' modules that the backend computes, exactly and in 8 bits."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from torch import nn

from smart_embedder.errors import StartupError
from smart_embedder.hardware.device import cpu_has_int8
from smart_embedder.kernels.attention import sdpa, varlen
from smart_embedder.models.families import auto_model as transformers_module
from smart_embedder.models.families import int8, module_parts
from smart_embedder.models.families.module_layouts import PADDED, PackedModule, PaddedModule
from smart_embedder.models.families.module_parts import find_parts
from tests.smart_embedder.models.families.states import target
from tests.support.checkpoints import spread_weights
from tests.support.encoders import (
    FAMILIES,
    SIZES,
    TEXTS,
    assert_close,
    embed,
    load,
    reference_vectors,
    save_family,
    save_modules,
    save_tokenizer,
    word_tokenizer,
)
from tests.support.wordpiece import change

needs_int8 = pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
INT8 = target(torch.bfloat16, "auto", quantized=True)
# Families with different parts, of each layout: packed, padded, one length at a time.
QUANTIZED = ["modernbert", "qwen2-causal", "t5", "convbert"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_tokenizer()


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@needs_int8
@pytest.mark.parametrize("family", QUANTIZED)
def test_int8_vectors_of_a_family_are_near_float32(family, tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / family, family, tokenizer)
    with capture_logs() as logs:
        model = load(folder, INT8)
    assert not [log for log in logs if log["event"] == "int8_differs"]
    assert model.info.dtype == "int8"
    assert model.info.paths["batch"] == FAMILIES[family][-1]
    assert {"int8_gemm", "quantize_rows"} <= model.info.paths.keys()
    alone = np.concatenate([embed(model, [text]) for text in TEXTS])
    cosines = (unit(alone) * unit(reference_vectors(folder, TEXTS))).sum(1)
    assert cosines.min() > 0.995
    np.testing.assert_array_equal(embed(model, TEXTS), alone)


LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
# Names of transformers, and sizes with other heads, windows, biases and activations.
VARIANTS = {
    "ModernBert": {
        "layer_types": LAYERS["layer_types"], "local_attention": 30, "attention_bias": True,
        "norm_bias": True, "mlp_bias": True, "hidden_activation": "gelu_pytorch_tanh",
    },
    "Gemma3Text": LAYERS | {
        "num_key_value_heads": 1, "head_dim": 24, "query_pre_attn_scalar": 64,
        "hidden_activation": "relu", "use_bidirectional_attention": True,
    },
    "EuroBert": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "Qwen3": {
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 50, "is_causal": False,
        "attention_bias": True, "hidden_act": "gelu",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_replaced_parts_of_other_sizes_match_transformers(name, tokenizer, tmp_path) -> None:
    config = getattr(transformers, f"{name}Config")(
        **SIZES | VARIANTS[name], bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3
    )
    torch.manual_seed(4)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    spread_weights(tmp_path)
    save_tokenizer(tmp_path, tokenizer)
    change(tmp_path / "config.json", architectures=None)
    save_modules(tmp_path)
    model = load(tmp_path, target(torch.float32, "auto"))
    assert "rotary" in model.info.paths
    assert not model.info.refused
    expected = reference_vectors(tmp_path, TEXTS)
    np.testing.assert_allclose(embed(model, TEXTS), expected, rtol=1e-5, atol=5e-5)


def module_of(family: str, **changes: Any) -> nn.Module:
    class_name, kind, sizes, _ = FAMILIES[family]
    config = getattr(transformers, f"{class_name}Config")(**sizes | changes)
    return getattr(transformers, f"{class_name}{kind}")(config).eval()


def named_parts(module: nn.Module, dtype: torch.dtype = torch.float32) -> set[str]:
    """Return the class names of a module's parts that can be replaced."""
    found = find_parts(module, dtype, packed=True)
    return {type(getattr(part.parent, part.name)).__name__ for part in found}


def test_find_parts_recognises_parts_by_their_layers() -> None:
    assert named_parts(module_of("modernbert")) == {
        "LayerNorm", "ModernBertAttention", "ModernBertMLP", "ModernBertRotaryEmbedding",
    }  # fmt: skip
    assert named_parts(module_of("embedding-gemma")) == {
        "Gemma3Attention", "Gemma3MLP", "Gemma3RMSNorm", "Gemma3RotaryEmbedding",
    }  # fmt: skip
    # With an unknown activation only the products are replaced.
    without_gate = {"GteAttention", "GteRotaryEmbedding", "LayerNorm", "Linear"}
    assert named_parts(module_of("gte", hidden_act="mish")) == without_gate
    # Attention needs a norm that changes nothing, which float16 does not have.
    assert named_parts(module_of("gte"), torch.float16) == {"GteMLP", "LayerNorm", "Linear"}


def test_find_parts_leaves_parts_with_unknown_layers() -> None:
    module = module_of("gte")
    for layer in module.layers:
        layer.mlp.scale = nn.Parameter(torch.ones(1))
        layer.self_attn.further = nn.Linear(2, 2)
    assert named_parts(module) == {"LayerNorm", "Linear"}


@pytest.fixture
def wrong_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks = module_parts.run_in_row_blocks
    monkeypatch.setattr(module_parts, "run_in_row_blocks", lambda *given: 2 * in_blocks(*given))


@pytest.mark.usefixtures("wrong_parts")
def test_wrong_replaced_parts_are_refused(tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / "gte", "gte", tokenizer)
    with capture_logs() as logs:
        model = load(folder, target(torch.float32, "auto"))
    assert [(log["event"], log["operation"], log["path"], log["used_instead"]) for log in logs] == [
        ("path_refused", "forward", "packed", "padded"),
        ("path_refused", "modules", "backend", "transformers"),
    ]
    assert [path.path for path in model.info.refused] == ["packed", "backend"]
    assert model.info.paths == {"attention": "sdpa", "batch": "padded"}
    assert_close(embed(model, TEXTS), reference_vectors(folder, TEXTS))


@needs_int8
@pytest.mark.usefixtures("wrong_parts")
def test_wrong_int8_parts_stop_the_start(tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / "gte", "gte", tokenizer)
    with pytest.raises(StartupError, match=r"not computed in 8 bits \(differs .*\); set DTYPE to"):
        load(folder, INT8)


@needs_int8
def test_int8_is_refused_for_a_model_that_cannot_run_in_bfloat16(tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / "fnet", "fnet", tokenizer)
    with pytest.raises(StartupError, match=r"fnet, is not computed in 8 bits \(.*: Unsupported"):
        load(folder, INT8)


@needs_int8
@pytest.mark.parametrize("family", ["gte", "roberta"])
def test_int8_vectors_far_from_float32_are_logged(family, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(int8, "_MIN_COSINE", 1.1)
    folder = save_family(tmp_path / family, family, tokenizer)
    with capture_logs() as logs:
        load(folder, INT8)
    (warning,) = logs
    assert (warning["event"], warning["model"]) == ("int8_differs", family)
    assert 0.99 < warning["cosine"] <= 1


@needs_int8
def test_int8_product_that_calibration_never_reaches_is_logged(
    tokenizer, tmp_path, monkeypatch
) -> None:
    loaded = transformers_module.load_module

    def load_with_more(folder, target, **options):
        whole, module = loaded(folder, target, **options)
        module.unused = nn.Linear(64, 64)
        return whole, module

    monkeypatch.setattr(transformers_module, "load_module", load_with_more)
    folder = save_family(tmp_path / "gte", "gte", tokenizer)
    with capture_logs() as logs:
        model = load(folder, INT8)
    (warning,) = logs
    assert (warning["event"], warning["products"]) == ("int8_not_calibrated", 1)
    unused = model._backbone._transformer._module.unused
    assert unused(torch.zeros(2, 64)).shape == (2, 64)


def test_module_is_capturable_if_the_attention_supports_its_window() -> None:
    module = module_of("modernbert")
    for attention, capturable in ((sdpa, False), (varlen, True)):
        assert PackedModule(module, attention).capturable == capturable
    assert not PaddedModule(module, PADDED).capturable
