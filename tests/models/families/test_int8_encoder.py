"""The encoder in 8 bits against transformers' own modules in float32, for any checkpoint."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, BertConfig, RobertaConfig, XLMRobertaConfig

from smart_embedder.engine.records import Outputs
from smart_embedder.errors import StartupError
from smart_embedder.models.device.choose import cpu_has_int8
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.families.load import load_encoder, load_tokenizer
from smart_embedder.models.ops.build import MAX_INT8
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.tasks.cross_encoder import load_cross_encoder
from smart_embedder.models.tasks.dense import M3Embedder, load_dense_embedder, load_m3_embedder
from tests.support.checkpoints import corpus, save_sentencepiece_tokenizer
from tests.support.texts import varied_texts
from tools.demo.checkpoint import build_demo_checkpoint

pytestmark = pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
CPU = torch.device("cpu")
CONFIGS = {"xlm-roberta": XLMRobertaConfig, "roberta": RobertaConfig, "bert": BertConfig}
ALL = Outputs(dense=True, sparse=True, colbert=True)


def target(dtype: torch.dtype = torch.float32, *, quantized: bool = False) -> Target:
    return Target(CPU, dtype, choose_backend(CPU, dtype, "sdpa"), quantized=quantized)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_sentencepiece_tokenizer(folder, corpus())
    return folder


def save_model(folder: Path, tokenizer_folder: Path, family: str, **changes) -> Path:
    size = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 192}
    config = CONFIGS[family](
        vocab_size=1200,
        num_hidden_layers=3,
        pad_token_id=0 if family == "bert" else 1,
        **(size | {"max_position_embeddings": 8194} | changes),
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("LayerNorm.weight" in name), std=0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    return folder


def states_of(folder: Path, sequences, how: Target) -> torch.Tensor:
    backbone = load_encoder(folder, how, load_tokenizer(folder, 8192))
    with torch.inference_mode():
        packed = backbone.pack(sequences)
        hidden = backbone.forward(packed)
    assert hidden.dtype == backbone.dtype == how.dtype
    return hidden[: packed.real_tokens].float()


def random_sequences(lengths) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    # 0 and 1 are padding tokens, which a text may spell out.
    return [rng.integers(0, 1200, length) for length in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("lengths", [(5, 17, 5, 1, 44, 3, 100), (1,), (2000,)])
def test_states_point_where_those_in_float32_do(
    family, lengths, dtype, tokenizer_folder, tmp_path
) -> None:
    folder = save_model(tmp_path, tokenizer_folder, family)
    sequences = random_sequences(lengths)
    exact = states_of(folder, sequences, target())
    actual = states_of(folder, sequences, target(dtype, quantized=True))
    assert functional.cosine_similarity(actual, exact).min() > 0.99


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_other_activations_are_computed(activation, tokenizer_folder, tmp_path) -> None:
    folder = save_model(tmp_path, tokenizer_folder, "bert", hidden_act=activation)
    sequences = random_sequences((9, 30))
    exact = states_of(folder, sequences, target())
    actual = states_of(folder, sequences, target(quantized=True))
    assert functional.cosine_similarity(actual, exact).min() > 0.99


def test_a_model_of_few_positions_is_calibrated(tokenizer_folder, tmp_path) -> None:
    folder = save_model(tmp_path, tokenizer_folder, "roberta", max_position_embeddings=50)
    sequences = random_sequences((48, 3))
    exact = states_of(folder, sequences, target())
    actual = states_of(folder, sequences, target(quantized=True))
    assert functional.cosine_similarity(actual, exact).min() > 0.99


def demo_with_outliers(folder: Path, size: float) -> Path:
    """The demo's real weights, of which four neurons and four channels of values are `size` larger.

    What reads them is as much smaller, so that the vectors hardly change.
    """
    build_demo_checkpoint(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    read = {"intermediate.dense": "output.dense", "attention.self.value": "attention.output.dense"}
    for layer in range(6):
        for maker, reader in read.items():
            for name in (f"{maker}.weight", f"{maker}.bias"):
                weights[f"encoder.layer.{layer}.{name}"][7:11] *= size
            weights[f"encoder.layer.{layer}.{reader}.weight"][:, 7:11] /= size
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("size", "least"),
    [(1.0, {"all": 0.998, "most": 0.9985}), (100.0, {"all": 0.99, "most": 0.998})],
    ids=["as they are", "with outliers"],
)
def test_trained_weights_are_exact_with_outliers_and_without(size, least, tmp_path: Path) -> None:
    folder = demo_with_outliers(tmp_path / "demo", size)
    texts = [text for text in varied_texts(60) if text.strip()]
    exact, ours = (
        embed(load_m3_embedder("demo", folder, 512, how), texts)
        for how in (target(), target(torch.bfloat16, quantized=True))
    )
    cosines = np.array([one.dense @ other.dense for one, other in zip(exact, ours, strict=True)])
    # Without VNNI weights have 7 bits.
    if target().backend.int8_weight_limit < MAX_INT8:
        least = {"all": 0.98, "most": 0.99}
    assert cosines.min() > least["all"]
    assert np.quantile(cosines, 0.05) > least["most"]


@pytest.fixture(scope="module")
def embedder(tiny_m3: Path) -> M3Embedder:
    return load_m3_embedder("tiny", tiny_m3, 8192, target(torch.bfloat16, quantized=True))


def embed(model: M3Embedder, texts: list[str]):
    return model.forward([text.ids for text in model.tokenize(texts)], ALL)


def test_all_three_kinds_are_close_to_those_in_float32(embedder: M3Embedder, tiny_m3: Path) -> None:
    texts = ["", *varied_texts(60)]
    exact = embed(load_m3_embedder("tiny", tiny_m3, 8192, target()), texts)
    for ours, theirs in zip(embed(embedder, texts), exact, strict=True):
        assert ours.dense @ theirs.dense > 0.99
        assert (ours.colbert * theirs.colbert).sum(1).min() > 0.98
        np.testing.assert_allclose(
            dict_of(ours.sparse, theirs.sparse), dict_of(theirs.sparse, ours.sparse), atol=0.1
        )


def dict_of(vector, other) -> np.ndarray:
    """The weights of `vector` at every id that either of the two has."""
    weights = dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
    ids = sorted({*weights, *other.indices.tolist()})
    return np.array([weights.get(each, 0.0) for each in ids])


def test_vectors_do_not_depend_on_batch_mates_or_place(embedder: M3Embedder) -> None:
    texts = varied_texts(40)
    alone = [embed(embedder, [text])[0] for text in texts]
    order = random.Random(1).sample(range(len(texts)), len(texts))
    for place, together in zip(order, embed(embedder, [texts[i] for i in order]), strict=True):
        assert together.dense @ alone[place].dense > 0.9999
        assert (together.colbert * alone[place].colbert).sum(1).min() > 0.9995


def test_a_reranker_keeps_its_order_of_passages(tiny_reranker: Path) -> None:
    query, passages = "search query", varied_texts(30)
    exact, ours = (
        score(load_cross_encoder("tiny", tiny_reranker, 512, how), query, passages)
        for how in (target(), target(torch.bfloat16, quantized=True))
    )
    assert np.corrcoef(exact, ours)[0, 1] > 0.99


def score(model, query: str, passages: list[str]) -> list[float]:
    pairs = model.tokenize_pairs(query, passages, None)
    return model.forward([pair.ids for pair in pairs], Outputs())


def test_a_qwen_model_is_refused(tiny_qwen: Path) -> None:
    with pytest.raises(StartupError, match="DTYPE=int8 is for models of bge-m3's .* type qwen3"):
        load_dense_embedder("tiny", tiny_qwen, 512, target(quantized=True))


def test_a_width_that_no_kernel_takes_is_computed(tokenizer_folder, tmp_path) -> None:
    folder = save_model(tmp_path, tokenizer_folder, "bert", hidden_size=66, num_attention_heads=2)
    sequences = random_sequences((9, 30))
    exact = states_of(folder, sequences, target())
    actual = states_of(folder, sequences, target(quantized=True))
    assert functional.cosine_similarity(actual, exact).min() > 0.99
