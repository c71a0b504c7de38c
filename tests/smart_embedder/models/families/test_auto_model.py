"""Encoders of many families by transformers' modules, compared with sentence-transformers."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from transformers import (
    M2M100Config,
    M2M100Model,
    MambaConfig,
    MambaModel,
    ReformerConfig,
    ReformerModel,
    T5EncoderModel,
)

from smart_embedder.errors import OutOfMemoryError, StartupError
from smart_embedder.interface import MemoryUsage
from smart_embedder.models.families import module_layouts, module_parts
from smart_embedder.models.families.module_parts import attend_packed
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.requests import EmbedRequest, Outputs
from tests.smart_embedder.engines import engine_on_cpu
from tests.support.checkpoints import changed_weights, corpus, spread_weights
from tests.support.encoders import (
    FAMILIES,
    GROUPED,
    SIZES,
    TEXTS,
    WIDTH,
    assert_close,
    embed,
    float32,
    load,
    reference_vectors,
    save_family,
    save_modules,
    save_tokenizer,
    word_tokenizer,
)
from tests.support.wordpiece import change

DENSE = Outputs(dense=True)
THETA = {"rope_theta": 10_000.0}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_tokenizer()


# Others are compared in tests/tools/matrix. These are variants, and layouts that few families have.
@pytest.mark.parametrize(
    "family",
    [
        *["embedding-gemma", "qwen3-bidirectional", "camembert", "convbert"],
    ],
)
def test_vectors_of_each_family_match_sentence_transformers(family, tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / family, family, tokenizer)
    with capture_logs() as logs:
        model = load(folder)
    layout = FAMILIES[family][-1]
    refused = {log["used_instead"] for log in logs if log["event"] == "path_refused"}
    assert refused == {layout} - {"own", "packed", "padded"}
    assert model.info.paths.get("batch", "own") == layout
    alone = np.concatenate([embed(model, [text]) for text in TEXTS])
    assert_close(alone, reference_vectors(folder, TEXTS))
    assert_close(embed(model, TEXTS), alone)
    assert model.max_length == 200


@pytest.mark.parametrize("error", [False, True])
def test_wrong_packed_attention_is_refused_and_padding_used(
    error, tokenizer, tmp_path, monkeypatch
) -> None:
    def wrong(*arguments, **options):
        if error:
            raise RecursionError
        attended, rest = attend(*arguments, **options)
        return attended * 1.01, rest

    attend = module_parts.attend_packed
    monkeypatch.setattr(module_parts, "attend_packed", wrong)
    folder = save_family(tmp_path / "gte", "gte", tokenizer)
    with capture_logs() as logs:
        model = load(folder)
    (warning,) = logs
    assert (warning["event"], warning["path"]) == ("path_refused", "packed")
    assert warning["used_instead"] == model.info.paths["batch"] == "padded"
    assert_close(embed(model, TEXTS), reference_vectors(folder, TEXTS))


def test_window_wider_than_every_text_of_the_trial(tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / "mistral", "mistral", tokenizer)
    change(folder / "sentence_bert_config.json", max_seq_length=3000)
    model = load(folder)
    text = " ".join(corpus(80))
    assert 1200 < len(model.tokenize([text])[0].ids) < 3000
    assert_close(embed(model, [text, "music"]), reference_vectors(folder, [text, "music"]))


def test_longrope_positions_are_those_of_each_text_alone(tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / "modernbert", "modernbert", tokenizer)
    long = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 100,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    }  # fmt: skip
    by_layer = {"full_attention": long, "sliding_attention": {"rope_type": "default"} | THETA}
    change(folder / "config.json", rope_parameters=by_layer)
    model = load(folder)
    assert model.info.paths["batch"] == "one_length"
    texts = [" ".join(corpus(9)), *TEXTS]
    lengths = [len(text.ids) for text in model.tokenize(texts)]
    assert max(lengths) > 100 > min(lengths)
    assert_close(embed(model, texts), reference_vectors(folder, texts))


@pytest.fixture(scope="module")
def t5(tokenizer: Tokenizer, tmp_path_factory) -> Path:
    folder = save_family(tmp_path_factory.mktemp("long") / "t5", "t5", tokenizer)
    change(folder / "sentence_bert_config.json", max_seq_length=8192)
    return folder


def test_padded_groups_fit_the_memory_of_attention(t5: Path, monkeypatch) -> None:
    rows = []
    forward = T5EncoderModel.forward

    def counted(self, input_ids, attention_mask):
        rows.append(tuple(input_ids.shape))
        return forward(self, input_ids, attention_mask)

    model = load(t5)
    monkeypatch.setattr(T5EncoderModel, "forward", counted)
    # 49 bytes for each pair: three times the scores of four heads in float32, and a byte of mask.
    monkeypatch.setattr(module_layouts, "_GROUP_BYTES", 49 * 2 * 120**2)
    ids = [np.full(length, 9) for length in (100, 110, 120, 120, 40, 40, 40)]
    together = model.forward(ids, DENSE)
    assert rows == [(3, 40), (2, 110), (2, 120)]
    for embedding, sequence in zip(together, ids, strict=True):
        assert_close(embedding.dense, model.forward([sequence], DENSE)[0].dense)


async def test_text_whose_attention_does_not_fit_the_memory_is_refused(
    t5: Path, monkeypatch
) -> None:
    long = " ".join(corpus(1200))
    async with engine_on_cpu(t5) as engine:
        alone = (await engine.embed(EmbedRequest(["music"]))).embeddings[0].dense
        free = MemoryUsage(used=2**30, total=2**31)
        monkeypatch.setattr(module_layouts, "memory_usage", lambda _: free)
        short, refused = await asyncio.gather(
            engine.embed(EmbedRequest(["music"])),
            engine.embed(EmbedRequest([long])),
            return_exceptions=True,
        )
    assert_close(short.embeddings[0].dense, alone)
    assert isinstance(refused, OutOfMemoryError)
    assert re.fullmatch(
        r"attention over a text of \d+ tokens takes \d\.\d GiB in this model, and 0\.5 GiB are "
        "available; send shorter texts, or lower max_tokens or EMBED_MAX_LENGTH",
        str(refused),
    )


# Options that the families implemented here leave to transformers.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": (
        "qwen3",
        {"rope_parameters": THETA | {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        }},
    ),
    "window": (
        "qwen3",
        {
            "use_sliding_window": True, "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "bias": ("qwen3", {"attention_bias": True}),
    "activation": ("qwen3", {"hidden_act": "mish"}),
    "swish": ("qwen3", {"hidden_act": "swish"}),
    "quick gelu": ("bert", {"hidden_act": "quick_gelu"}),
    "decoder": ("bert", {"is_decoder": True}),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options_left_to_transformers_match_it(option, tokenizer, tmp_path) -> None:
    family, options = OPTIONS[option]
    options = (GROUPED | {"head_dim": 16} if family == "qwen3" else SIZES) | options
    name = {"qwen3": "Qwen3", "bert": "Bert"}[family]
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**options)
    kind = getattr(transformers, f"{name}Model")
    folder = save_with_tokenizer(tmp_path, kind(config), tokenizer)
    model = load(folder)
    assert ("batch" in model.info.paths) == (option != "swish")
    alone = np.concatenate([embed(model, [text]) for text in TEXTS])
    assert_close(alone, mean_states(kind.from_pretrained(folder), model))
    assert_close(embed(model, TEXTS), alone)


def test_direction_that_transformers_does_not_compute_is_refused(tokenizer, tmp_path) -> None:
    sizes = {"vocab_size": 700, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8}
    folder = save_with_tokenizer(tmp_path, MambaModel(MambaConfig(**sizes)), tokenizer)
    change(folder / "config.json", use_bidirectional_attention=True)
    with pytest.raises(StartupError, match="of type mamba, attends in both directions by its"):
        load(folder)


def save_with_tokenizer(folder: Path, module: Any, tokenizer: Tokenizer) -> Path:
    module.save_pretrained(folder)
    spread_weights(folder)
    save_tokenizer(folder, tokenizer)
    return save_modules(folder)


def mean_states(module: Any, model: DenseEmbedder) -> np.ndarray:
    """Return the mean of the states that transformers computes for each text alone."""
    module.eval()
    with torch.inference_mode():
        tokens = [torch.from_numpy(text.ids)[None] for text in model.tokenize(TEXTS)]
        return np.stack([module(ids).last_hidden_state[0].mean(0).numpy() for ids in tokens])


def test_encoder_is_served_if_the_decoder_needs_another_text(tokenizer, tmp_path) -> None:
    """The encoder alone is needed, but also the table that it shares with the decoder."""
    torch.manual_seed(4)
    config = M2M100Config(
        vocab_size=700, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=512,
        decoder_ffn_dim=512, encoder_attention_heads=4, decoder_attention_heads=4,
    )  # fmt: skip
    folder = save_with_tokenizer(tmp_path, M2M100Model(config), tokenizer)
    encoder = M2M100Model.from_pretrained(folder).get_encoder()
    with changed_weights(folder) as weights:
        del weights["decoder.layers.0.fc1.bias"]
    model = load(folder)
    assert_close(embed(model, TEXTS), mean_states(encoder, model))
    with changed_weights(folder) as weights:
        del weights["shared.weight"]
    with pytest.raises(StartupError, match=r"lacks the tensor \w+\.embed_tokens\.weight"):
        load(folder)


def test_random_model_is_refused(tokenizer, tmp_path) -> None:
    """Reformer draws new hashes at each forward unless it has a seed."""
    config = ReformerConfig(
        vocab_size=700, hidden_size=WIDTH, attention_head_size=16, num_attention_heads=4,
        attn_layers=["lsh"], axial_pos_embds=False, feed_forward_size=96, num_buckets=8,
        lsh_attn_chunk_length=8, max_position_embeddings=128, is_decoder=False,
    )  # fmt: skip
    ReformerModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, tokenizer)
    with pytest.raises(
        StartupError, match="of type reformer, computes different vectors for the same"
    ):
        load(save_modules(tmp_path))


@pytest.mark.parametrize("known", [False, True])
def test_checkpoint_code_is_never_run(known, tokenizer, tmp_path) -> None:
    folder = save_family(tmp_path / "code", "gte", tokenizer)
    ran = tmp_path / "ran"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil"}
    change(folder / "config.json", auto_map=auto_map, **({} if known else {"model_type": "evil"}))
    if known:
        plain = save_family(tmp_path / "plain", "gte", tokenizer)
        with capture_logs() as logs:
            model = load(folder)
        assert_close(embed(model, TEXTS), reference_vectors(plain, TEXTS))
        ignored = [line for line in logs if line["event"] == "checkpoint_code_ignored"]
        assert [(line["model"], line["log_level"]) for line in ignored] == [("code", "warning")]
    else:
        with pytest.raises(StartupError, match="needs code of its own .* is never run"):
            load(folder)
    assert not ran.exists()


def test_named_attention_is_refused_for_a_family_with_its_own(t5: Path) -> None:
    with pytest.raises(StartupError, match="has its own attention"):
        load(t5, replace(float32(), attention_named=True))


def lose_a_tensor(folder: Path) -> None:
    with changed_weights(folder) as weights:
        del weights[next(name for name in weights if "q_proj" in name)]


def store_bytes(folder: Path) -> None:
    """Store a tensor as a quantized checkpoint does; transformers would not read its scales."""
    with changed_weights(folder) as weights:
        name = next(name for name in weights if "q_proj" in name)
        weights[name] = (weights[name] * 100).to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (store_bytes, r"has the tensor layers\.0\.self_attn\.q_proj\.weight in int8; take one in"),
        (lose_a_tensor, r"lacks the tensor layers\.0\.self_attn\.q_proj"),
        ({"model_type": "brain"}, "holds a model of type brain, which transformers .* does not kn"),
        ({"model_type": "vit"}, "of type vit, which reads no texts"),
        ({"model_type": "xclip"}, "of type xclip, which projects texts and other inputs into one"),
        (
            {"position_embedding_type": "relative_key_query"},
            "has positions of type relative_key_query, which transformers",
        ),
        ({"rms_norm_eps": float("inf")}, "no usable rms_norm_eps: inf"),
        ({"vocab_size": 10**9}, "describes a model of .* numbers, and its weights have"),
        ({"vocab_size": 650}, "transformers cannot load the model in .*: You set"),
    ],
)
def test_unusable_checkpoint_is_refused_in_one_sentence(
    damage, message, tokenizer, tmp_path
) -> None:
    folder = save_family(tmp_path / "gemma", "embedding-gemma", tokenizer)
    if callable(damage):
        damage(folder)
    else:
        change(folder / "config.json", **damage)
    with pytest.raises(StartupError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["position_bias", "softcap", "s_aux", "cache"])
def test_attend_packed_refuses_unsupported_options(name) -> None:
    states = torch.zeros(3, 1, 2, 5, 4)
    with pytest.raises(ValueError, match=f"the attention has {name}"):
        attend_packed(SimpleNamespace(), *states, None, packed_attention=None, **{name: 1})
