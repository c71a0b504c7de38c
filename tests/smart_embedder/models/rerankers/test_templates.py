"""Language models with templates that `kind` names, compared with their reference programs."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from FlagEmbedding import FlagLLMReranker
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer as SentenceTransformerModule
from sentence_transformers.cross_encoder.modules import LogitScore
from structlog.testing import capture_logs
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.models.rerankers.heads import PLAIN_HEADS
from smart_embedder.models.rerankers.pairs import TemplatePairs
from smart_embedder.models.rerankers.reranker import Reranker
from smart_embedder.models.rerankers.templates import PASSAGE, TEMPLATES
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import TruncationOptions
from smart_embedder.tokens import TokenSpans
from tests.support.checkpoints import changed_json, save_byte_level_tokenizer, spread_weights
from tests.support.encoders import assert_close, load_scorer, reference_scores, score
from tests.support.wordpiece import change

QUERY = "hybrid search?"
PASSAGES = ["vector", "memory.\n", "", "  rank " * 12, "unknown жизнь!"]
CONFIGS = {
    "bge-reranker-v2-gemma": GemmaConfig,
    "ctxl-rerank-v2": MistralConfig,
    "mxbai-rerank-v2": Qwen2Config,
    "zerank-2": Qwen3Config,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    return {kind: save_language_model(root / kind, kind) for kind in CONFIGS}


def save_language_model(folder: Path, kind: str) -> Path:
    folder.mkdir()
    size = save_byte_level_tokenizer(folder, ("Yes", "no"), template_adds_end=False)
    config = CONFIGS[kind](
        vocab_size=size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=2048,
        pad_token_id=0, bos_token_id=None, eos_token_id=2, tie_word_embeddings=kind != "zerank-2",
    )  # fmt: skip
    save_weights(folder, config)
    return folder


def save_weights(folder: Path, config: Any) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    spread_weights(folder)


def load(folder: Path, max_length: int = 1024, kind: str | None = None) -> Reranker:
    model = load_scorer(folder, max_length, kind)
    assert isinstance(model._pairs, TemplatePairs)
    return model


def published_scores(kind: str, folder: Path, instruction: str | None) -> list[float]:
    """Compute the scores as the program that the model was published with."""
    if kind == "bge-reranker-v2-gemma":
        reranker = FlagLLMReranker(str(folder), devices=["cpu"], max_length=1024, batch_size=1)
        return reranker.compute_score([(QUERY, passage) for passage in PASSAGES])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for passage in PASSAGES:
        if kind == "zerank-2":
            start, end = "<|im_start|>", "<|im_end|>\n"
            roles = (("system", QUERY.strip()), ("user", passage.strip()))
            turns = "".join(f"{start}{role}\n{text}{end}" for role, text in roles)
            parts, answers = [f"{turns}{start}assistant\n"], ("Yes",)
        elif kind == "ctxl-rerank-v2":
            told = "" if instruction is None else f" {instruction}"
            task = (
                "Check whether a given document contains information helpful to answer the query."
            )
            pair = f"<Document> {passage}\n<Query> {QUERY}{told} ??"
            parts, answers = [f"{task}\n{pair}"], (tokenizer.convert_ids_to_tokens(0),)
        else:
            system, answers = TEMPLATES[kind].parts[0], ("1", "0")
            told = [] if instruction is None else [f"instruction: {instruction}", "\n"]
            parts = [system, *told, f"query: {QUERY}", "\n", f"document: {passage}"]
            parts += TEMPLATES[kind].parts[-3:]
        ids = [id_ for part in parts for id_ in tokenizer(part)["input_ids"]]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        yes, *no = (logits[tokenizer.convert_tokens_to_ids(answer)].item() for answer in answers)
        scores.append(yes - sum(no))
    return scores


@pytest.mark.parametrize("kind", CONFIGS)
def test_template_scores_equal_the_reference(kind: str, folders) -> None:
    model = load(folders[kind], kind=kind)
    for instruction in (None, "Find the recipe")[: 1 + model.reads_instruction]:
        expected = published_scores(kind, folders[kind], instruction)
        assert_close(score(model, QUERY, PASSAGES, instruction), expected)
        assert np.ptp(expected) > 1e-3


def test_long_instruction_is_refused(folders) -> None:
    model = load(folders["mxbai-rerank-v2"], kind="mxbai-rerank-v2")
    with pytest.raises(InvalidRequestError, match=r"the instruction has more than the \d+ tokens"):
        model.tokenize_pairs(QUERY, PASSAGES, "find a recipe " * 400)


def test_template_of_another_architecture_is_refused(folders) -> None:
    with pytest.raises(StartupError, match="and kind=mxbai-rerank-v2 is for a "):
        load(folders["zerank-2"], kind="mxbai-rerank-v2")


@pytest.mark.parametrize("kind", CONFIGS)
def test_passage_is_cut_and_the_template_never(kind: str, folders) -> None:
    model = load(folders[kind], 400, kind)
    long, short = model.tokenize_pairs(QUERY, ["vector " * 999, "vector"], None)
    assert len(long.ids) == model.max_length == 400
    (end,) = model._tokenizer.encode_plain([TEMPLATES[kind].parts[-1].rpartition(PASSAGE)[2]], 999)
    end = end.ids[-3:]
    assert long.ids[-len(end) :].tolist() == short.ids[-len(end) :].tolist() == end.tolist()
    assert short.passage.kept == short.passage.total == 1
    assert long.passage.kept < long.passage.total
    words = [*map(str, range(999))]
    (left,) = model.tokenize_pairs(QUERY, [" ".join(words)], None, TruncationOptions(side="left"))
    assert len(left.ids) == 400
    kept = model._tokenizer._tokenizer.decode(left.ids.tolist(), skip_special_tokens=False)
    assert "998" in kept
    assert "0 1 2" not in kept


# Instructions, queries and documents by their roles, as published rerankers of this autumn.
CHAT = (
    "{%- for message in messages if message.role == 'system' -%}"
    "<Instruct>: {{ message.content }}\n{% endfor -%}"
    "<|im_start|>{% for message in messages if message.role == 'query' -%}"
    "<Query>: {{ message.content }}\n{% endfor -%}"
    "{%- for message in messages if message.role == 'document' -%}"
    "<Document>: {{ message.content }}{% endfor %}<|im_end|>"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASK = "find the recipe"


def save_scores(
    folder: Path, answers: tuple[int, int | None], template: str = CHAT, **options: Any
) -> Path:
    """Save a language model with `LogitScore` and a chat template, as sentence-transformers."""
    transformer = SentenceTransformerModule(
        str(folder),
        transformer_task="text-generation",
        processor_kwargs={"chat_template": template},
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    modules = [transformer, LogitScore(*answers)]
    CrossEncoder(modules=modules, device="cpu", **options).save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(("answers", "default"), [((7, 9), None), ((11, None), "task")])
def test_logit_score_with_a_chat_template_equals_sentence_transformers(
    answers, default, folders, tmp_path: Path
) -> None:
    prompts = {"prompts": {"task": TASK}, "default_prompt_name": default}
    copy = copytree(folders["ctxl-rerank-v2"], tmp_path / "copy")
    save_scores(copy, answers, **prompts)
    with capture_logs() as logs:
        model = load(copy)
    assert logs == []
    for instruction in (None, TASK, "Find it?"):
        expected = reference_scores(copy, QUERY, PASSAGES, instruction)
        assert_close(score(model, QUERY, PASSAGES, instruction), expected)
        assert np.ptp(expected) > 1e-3


@pytest.fixture(scope="module")
def scored(folders, tmp_path_factory) -> Path:
    """A folder with scores by a chat template, which is not changed."""
    folder = tmp_path_factory.mktemp("scored") / "model"
    return save_scores(copytree(folders["ctxl-rerank-v2"], folder), (7, 9))


@pytest.fixture
def copy(scored: Path, tmp_path: Path) -> Path:
    return copytree(scored, tmp_path / "copy")


@pytest.mark.parametrize("kind", ["ctxl-rerank-v2", "zerank-2", None])
def test_long_query_is_cut_and_tokenized_once(kind: str | None, folders, scored: Path) -> None:
    """Beside each passage of a template that is tokenized as a whole, only what is kept is."""
    model = load(scored if kind is None else folders[kind], 400, kind)
    query = " ".join(map(str, range(2000)))
    counted, spans = [], TextTokenizer.spans

    def count(self: TextTokenizer, text: str) -> Iterator[TokenSpans]:
        counted.append(len(text))
        return spans(self, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTokenizer, "spans", count)
        pairs = model.tokenize_pairs(query, ["vector"] * 50, None)
    assert sum(length > len(query) for length in counted) <= 1
    (first, *others) = pairs
    assert all(pair.ids.tolist() == first.ids.tolist() for pair in others)
    assert first.query.kept < first.query.total
    assert first.passage.kept == first.passage.total == 1
    assert len(first.ids) <= 400


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}", "does not repeat the text of each message once"),
        (CHAT + "{{ messages[-1].content }}", "does not repeat the text of each message"),
        (
            "{% for m in messages if m.content %}{{ m.role }}: {{ m.content }}{% endfor %}",
            "does not repeat the text of each message",
        ),
        (CHAT + "{{ strftime_now('%d') }}", "says the date"),
    ],
)
def test_chat_template_that_does_not_repeat_the_texts_is_refused(
    template, message, copy: Path
) -> None:
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(StartupError, match=message):
        load(copy)


def with_another_feature(folder: Path) -> None:
    change(folder / "1_LogitScore" / "config.json", module_input_name="other_logits")


def without_messages(folder: Path) -> None:
    with changed_json(folder / "sentence_bert_config.json") as texts:
        del texts["modality_config"]["message"], texts["processing_kwargs"]


def with_further_steps(folder: Path) -> None:
    change(folder / "config.json", model_type="granite", logits_scaling=8.0)


def with_a_softcap(folder: Path) -> None:
    change(folder / "config.json", final_logit_softcapping=30.0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_another_feature, "works on other_logits; supported here: causal_logits"),
        (without_messages, "reads pairs without a chat template"),
        (with_further_steps, "of type granite, whose logits are not supported"),
        (with_a_softcap, "whose logits are not supported"),
    ],
)
def test_language_model_of_another_form_is_refused(spoil, message: str, copy: Path) -> None:
    spoil(copy)
    with pytest.raises(StartupError, match=message):
        load(copy)


@pytest.mark.parametrize("model_type", sorted(PLAIN_HEADS))
def test_logits_of_each_listed_type_equal_sentence_transformers(
    model_type: str, copy: Path
) -> None:
    known = AutoConfig.from_pretrained(copy)
    config = AutoConfig.for_model(
        model_type, vocab_size=known.vocab_size, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
        pad_token_id=0, bos_token_id=None, eos_token_id=2, tie_word_embeddings=model_type > "m",
    )  # fmt: skip
    save_weights(copy, config)
    expected = reference_scores(copy, QUERY, PASSAGES)
    assert_close(score(load(copy), QUERY, PASSAGES), expected)
