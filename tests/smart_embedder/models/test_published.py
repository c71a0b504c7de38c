"""Tiny folders in the form in which models were published, compared with transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import (
    AutoModel,
    AutoTokenizer,
    EmbeddingGemma2Config,
    EmbeddingGemma2Model,
    EmbeddingGemma2TextConfig,
    Gemma4AudioConfig,
    Gemma4VisionConfig,
    GemmaTokenizer,
)

from smart_embedder.errors import StartupError
from smart_embedder.requests import TruncationOptions
from tests.support.checkpoints import changed_json, changed_weights, corpus, spread_weights
from tests.support.encoders import (
    TEXTS,
    WIDTH,
    assert_close,
    embed,
    load,
    reference,
    save_family,
    save_modules,
    word_tokenizer,
)
from tests.support.wordpiece import change

PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
# The texts of a message behind each other, as in the published template.
TEMPLATE = (
    "{%- for message in messages -%}{%- if message['content'] is string -%}"
    "{{ message['content'] }}{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part.get('type') == 'text' -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}


def save_gemma_tokenizer(folder: Path) -> int:
    """Save a GemmaTokenizer that begins and ends texts; return the size of its vocabulary."""
    unused = [f"<unused{number}>" for number in range(20)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *unused, "<|image|>", "<|audio|>"]
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    bpe.train_from_iterator(corpus(400), trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = GemmaTokenizer(
        vocab=model["vocab"],
        merges=list(map(tuple, model["merges"])),
        add_bos_token=True,
        add_eos_token=True,
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


@pytest.fixture(scope="module")
def embedding_gemma2(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("embeddinggemma-2")
    text = EmbeddingGemma2TextConfig(
        vocab_size=save_gemma_tokenizer(folder), hidden_size=WIDTH, intermediate_size=96,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=64, sliding_window=16, hidden_size_per_layer_input=32,
        use_bidirectional_attention="all", embedding_dim=48,
        per_layer_config={5: {"head_dim": 32, "num_key_value_heads": 1}},
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, position_embedding_size=64,
    )  # fmt: skip
    audio = Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=32
    )
    config = EmbeddingGemma2Config(
        text_config=text, vision_config=vision, audio_config=audio, image_token_id=25,
        audio_token_id=26,
    )  # fmt: skip
    torch.manual_seed(0)
    EmbeddingGemma2Model(config).save_pretrained(folder)
    spread_weights(folder)
    (folder / "processor_config.json").write_text('{"processor_class": "EmbeddingGemma2Processor"}')
    pooling = {"embedding_dimension": 48, "pooling_mode": "mean"}
    modalities = dict.fromkeys(("text", "image", "audio", "video"), FORWARD)
    modalities["message"] = FORWARD | {"format": "structured"}
    save_modules(folder, pooling, [("Normalize", {}, None)], prompts={"prompts": PROMPTS})
    texts = {"transformer_task": "feature-extraction", "modality_config": modalities}
    (folder / "sentence_bert_config.json").write_text(json.dumps(texts))
    return folder


def normalized_means(folder: Path, texts: list[str], prompt: str) -> np.ndarray:
    """Compute the unit means of the states that transformers computes of each text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    vectors = []
    for text in texts:
        tokens = tokenizer(prompt + text, return_tensors="pt")
        with torch.inference_mode():
            states = model(**tokens).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize("prompt", ["", PROMPTS["query"]])
def test_embeddinggemma2_as_published_equals_transformers(
    prompt: str, embedding_gemma2: Path
) -> None:
    with capture_logs() as logs:
        model = load(embedding_gemma2, max_length=400)
    assert [entry["event"] for entry in logs] == ["only_texts_read"]
    # Beyond the positions of its configuration, which rotary positions do not need.
    assert (model.max_length, model.dense_width, model.prompts) == (400, 48, PROMPTS)
    texts = [*TEXTS[:5], " a  b\n", "vector " * 90]
    assert_close(embed(model, texts, prompt), normalized_means(embedding_gemma2, texts, prompt))


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_chat_embedder(folder: Path, base: Path, template: str, **options: object) -> Path:
    """Save a model that sentence-transformers made of a language model with a chat template."""
    transformer = Transformer(
        str(base), processor_kwargs={"chat_template": template}, processing_kwargs=options
    )
    modules = [transformer, Pooling(WIDTH, "lasttoken")]
    model = SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu")
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (CHAT, {"chat_template": {"add_generation_prompt": True}}),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {}),
    ],
)
def test_texts_are_read_as_messages_like_sentence_transformers(
    template: str, options, tiny_qwen: Path, tmp_path: Path
) -> None:
    folder = save_chat_embedder(tmp_path / "chat", tiny_qwen, template, **options)
    model, texts = load(folder, max_length=64), ["vector", "...", " a  b\n", "hybrid?"]
    texts += [""] * (template == CHAT)  # sentence-transformers reads no text without tokens.
    theirs = reference(folder)
    for prompt in (None, *PROMPTS.values()):
        expected = theirs.encode(texts, batch_size=1, prompt=prompt)
        assert_close(embed(model, texts, prompt or ""), expected)
    (whole,) = model.tokenize(["vector"])
    (long,) = model.tokenize(["vector " * 99])
    assert len(long.ids) == 64
    end = len(model._tokenizer._suffix)
    assert long.ids[64 - end :].tolist() == whole.ids[len(whole.ids) - end :].tolist()
    (cut,) = model.tokenize(["vector " * 9], "", TruncationOptions(max_tokens=1))
    assert cut.ids.tolist() == whole.ids.tolist()
    assert load(tiny_qwen).spaces["dense"] != model.spaces["dense"]


def write(template: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            write("{{ messages[0].content | trim }}"),
            "does not repeat the text of each message once, as it is",
        ),
        (
            write("{% for message in messages %}{{ message.content }}vector{% endfor %}"),
            "with signs that are no tokens of their own",
        ),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "and has no template"),
    ],
)
def test_chat_templates_that_change_texts_are_refused(
    spoil, message: str, tiny_qwen: Path, tmp_path: Path
) -> None:
    folder = save_chat_embedder(tmp_path / "chat", tiny_qwen, CHAT)
    spoil(folder)
    with pytest.raises(StartupError, match=message):
        load(folder)


AUTO_MAP = {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}


@pytest.fixture(scope="module")
def bidirectional_qwen3(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    return save_family(folder, "qwen3-bidirectional", word_tokenizer())


def mean_states(folder: Path) -> torch.Tensor:
    """Compute the mean of the states of each text as transformers, for a model in both ways."""
    states = reference(folder).encode(TEXTS, output_value="token_embeddings")
    return torch.stack([state.mean(0) for state in states])


def test_pplx_embed_as_published_makes_its_whole_numbers(
    bidirectional_qwen3: Path, tmp_path: Path
) -> None:
    folder = copytree(bidirectional_qwen3, tmp_path / "pplx-embed-v1-0.6b")
    own = {"model_type": "bidirectional_pplx_qwen3", "architectures": ["PPLXQwen3Model"]}
    change(folder / "config.json", **own, auto_map=AUTO_MAP, use_bidirectional_attention=True)
    with changed_json(folder / "config.json") as config:
        del config["is_causal"]
    with changed_json(folder / "modules.json") as modules:
        quantizer = {"type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
        modules.append({"idx": 2, "name": "2", "path": ""} | quantizer)
    with capture_logs() as logs:
        model = load(folder)
    assert [entry["event"] for entry in logs] == ["checkpoint_code_ignored"]
    vectors = embed(model, TEXTS)
    assert (vectors == vectors.round()).all()
    exact = 127 * mean_states(bidirectional_qwen3).tanh().numpy()
    assert np.abs(vectors - exact).max() < 0.501
    assert not model.normalizes
    change(folder / "config.json", architectures=["PPLXQwen3ContextualModel"])
    with pytest.raises(StartupError, match="is computed for pplx-embed alone"):
        load(folder)


def test_voyage_4_nano_as_published_is_projected_and_normalized(
    bidirectional_qwen3: Path, tmp_path: Path
) -> None:
    prompt = "Represent the query for retrieving documents: "
    folder = copytree(bidirectional_qwen3, tmp_path / "voyage-4-nano")
    named = {"architectures": ["Qwen3BidirectionalModel"], "auto_map": AUTO_MAP, "num_labels": 96}
    change(folder / "config.json", **named, use_bidirectional_attention=True)
    with changed_json(folder / "config.json") as config:
        del config["is_causal"]
    save_modules(folder, further=[("Normalize", {}, None)], prompts={"prompts": {"query": prompt}})
    projection = torch.randn(96, WIDTH)
    with changed_weights(folder) as weights:
        for name in [*weights]:
            weights[f"model.{name}"] = weights.pop(name)
        weights["linear.weight"] = projection
    model = load(folder)
    states = reference(bidirectional_qwen3).encode(
        [prompt + text for text in TEXTS], output_value="token_embeddings"
    )
    means = torch.stack([(state @ projection.T).mean(0) for state in states])
    assert_close(embed(model, TEXTS, prompt), torch.nn.functional.normalize(means, dim=1))
    assert (model.dense_width, model.normalizes) == (96, True)
    save_modules(folder, {"pooling_mode": "max"})
    with pytest.raises(StartupError, match="projects the states of tokens, and its pooling is max"):
        load(folder)
    change(folder / "config.json", use_bidirectional_attention=False)
    with pytest.raises(StartupError, match=r"has the tensor linear\.weight \(96 x 64\)"):
        load(folder)
