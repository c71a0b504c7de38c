"""Language models with templates that `kind` names, compared with their reference programs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from FlagEmbedding import FlagLLMReranker
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, Qwen2Config, Qwen3Config

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.kernels.target import Target
from smart_embedder.models.loader import load_reranker
from smart_embedder.models.rerankers.templates import TEMPLATES, TemplateReranker
from smart_embedder.requests import Outputs
from tests.support.checkpoints import save_byte_level_tokenizer, spread_weights

QUERY = "hybrid search?"
PASSAGES = ["vector", "memory.\n", "", "  rank " * 12, "unknown жизнь!"]
CONFIGS = {
    "bge-reranker-v2-gemma": GemmaConfig,
    "mxbai-rerank-v2": Qwen2Config,
    "zerank-2": Qwen3Config,
}


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("templates") / "any name"
    folder.mkdir()
    size = save_byte_level_tokenizer(folder, ("Yes", "no"), template_adds_end=False)
    torch.manual_seed(3)
    config = CONFIGS[kind](
        vocab_size=size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=2048,
        pad_token_id=0, bos_token_id=None, eos_token_id=2, tie_word_embeddings=kind != "zerank-2",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    spread_weights(folder)
    return folder


def reference_scores(kind: str, folder: Path, instruction: str | None) -> list[float]:
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
        else:
            template, answers = TEMPLATES[kind], ("1", "0")
            told = [] if instruction is None else [f"instruction: {instruction}", "\n"]
            parts = [*template.before, *told, f"query: {QUERY}", "\n", f"document: {passage}"]
            parts += template.behind
        ids = [id_ for part in parts for id_ in tokenizer(part)["input_ids"]]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        yes, *no = (logits[tokenizer.convert_tokens_to_ids(answer)].item() for answer in answers)
        scores.append(yes - sum(no))
    return scores


@pytest.mark.parametrize("instruction", [None, "Find the recipe"])
def test_template_scores_equal_the_reference(
    kind: str, folder: Path, instruction: str | None, float32_target: Target
) -> None:
    model = load_reranker("m", folder, 1024, float32_target, max_qwen_pairs=4, kind=kind)
    assert isinstance(model, TemplateReranker)
    if instruction is not None and not model.reads_instruction:
        pytest.skip("it reads no instruction")
    pairs = model.tokenize_pairs(QUERY, PASSAGES, instruction)
    ours = model.forward([pair.ids for pair in pairs], Outputs())
    expected = reference_scores(kind, folder, instruction)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 1e-3


def test_long_instruction_is_refused(kind: str, folder: Path, float32_target: Target) -> None:
    model = load_reranker("m", folder, 1024, float32_target, max_qwen_pairs=4, kind=kind)
    if not model.reads_instruction:
        pytest.skip("it reads no instruction")
    with pytest.raises(InvalidRequestError, match=r"the instruction has more than the \d+ tokens"):
        model.tokenize_pairs(QUERY, PASSAGES, "find a recipe " * 400)


def test_template_of_another_architecture_is_refused(
    kind: str, folder: Path, float32_target: Target
) -> None:
    (other, *_) = CONFIGS.keys() - {kind}
    with pytest.raises(StartupError, match=f"and kind={other} is for a "):
        load_reranker("m", folder, 1024, float32_target, max_qwen_pairs=4, kind=other)


def test_passage_is_cut_and_the_template_never(
    kind: str, folder: Path, float32_target: Target
) -> None:
    model = load_reranker("m", folder, 400, float32_target, max_qwen_pairs=4, kind=kind)
    long, short = model.tokenize_pairs(QUERY, ["vector " * 999, "vector"], None)
    assert len(long.ids) == model.max_length == 400
    behind = len(model._behind)
    assert long.ids[-behind:].tolist() == short.ids[-behind:].tolist()
    assert short.passage_kept == short.passage_tokens == 1
    assert long.passage_kept < long.passage_tokens
