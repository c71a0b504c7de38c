"""The reference implementations: FlagEmbedding for bge-m3, transformers for the others.

Written for plainness: one padded batch after the other, in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from FlagEmbedding import BGEM3FlagModel
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from app.engine.types import FloatArray
from app.models.checkpoint.config import read_config
from app.models.checkpoint.sentence_config import POOLINGS, read_pooling
from app.models.families import is_qwen3
from app.models.runtime import ModelFolders
from app.models.tasks.dense import QWEN_END
from app.models.tasks.m3 import HEADS
from app.models.text.qwen_prompt import DEFAULT_INSTRUCTION, PREFIX, SUFFIX
from app.settings import LATE_INTERACTION, Settings

_BATCH = 8
_NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class M3Vectors:
    """What FlagEmbedding returns for N texts.

    `dense` is `[N, width]`, `sparse` weights by token id, `colbert` `[tokens - 1, width]` each.
    """

    dense: FloatArray
    sparse: list[dict[int, float]]
    colbert: list[FloatArray]


def m3_limit(settings: Settings, folder: Path) -> int:
    """The limit in force, which a model with fewer positions lowers."""
    config = read_config(folder)
    reserved = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    return min(settings.embed_max_length, int(config["max_position_embeddings"]) - reserved)


def rerank_scores(
    settings: Settings, folders: ModelFolders, query: str, passages: list[str]
) -> tuple[str, list[float]]:
    """The configured reranker's scores, and whose implementation computed them."""
    folder = folders.reranker or folders.embedding
    if settings.reranker_model == LATE_INTERACTION:
        limit, pooling = m3_limit(settings, folder), read_pooling(folder)
        return "FlagEmbedding", late_interaction_scores(folder, query, passages, limit, pooling)
    if read_config(folder).get("model_type") == "qwen3":
        limit = settings.qwen_rerank_max_length
        return "transformers", qwen_scores(folder, query, passages, limit)
    limit = settings.bge_rerank_max_length
    return "FlagEmbedding", reranker_logits(folder, query, passages, limit)


def is_m3(folder: Path) -> bool:
    """Whether the model makes dense, sparse and ColBERT vectors."""
    return all((folder / head).is_file() for head in HEADS)


def dense_vectors(settings: Settings, folder: Path, texts: list[str]) -> tuple[str, FloatArray]:
    """Those of a model that makes no others, and whose implementation computed them."""
    if is_qwen3(folder):
        return "transformers", qwen_states(folder, texts, settings.qwen_embed_max_length)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    model.max_seq_length = min(settings.embed_max_length, model.max_seq_length or _NO_LIMIT)
    if settings.pooling is not None:
        names = {ours: theirs for theirs, ours in POOLINGS.items()}
        model[1].pooling_mode = names[settings.pooling]
    return "sentence-transformers", np.asarray(model.encode(texts), np.float32)


def m3_vectors(folder: Path, texts: list[str], max_length: int, pooling: str) -> M3Vectors:
    """All three kinds of vectors by `BGEM3FlagModel`."""
    model = _m3(folder, pooling)
    found = _encode(model, texts, max_length)
    # XLM-RoBERTa's separator is its end token, which is dropped; BERT's is dropped here.
    separator = model.tokenizer.sep_token_id
    return M3Vectors(
        dense=np.asarray(found["dense_vecs"], np.float32),
        sparse=[_without(separator, weights) for weights in found["lexical_weights"]],
        colbert=[np.asarray(vectors, np.float32) for vectors in found["colbert_vecs"]],
    )


def late_interaction_scores(
    folder: Path, query: str, passages: list[str], max_length: int, pooling: str
) -> list[float]:
    """The mean of the three scores that `BGEM3FlagModel` computes from its own vectors.

    (Its `compute_score` gives the same, but wants a tokenizer with XLM-RoBERTa's special tokens.)
    """
    model = _m3(folder, pooling)
    found = _encode(model, [query, *passages], max_length)
    dense, weights, vectors = (
        found[kind] for kind in ("dense_vecs", "lexical_weights", "colbert_vecs")
    )
    return [
        float(
            dense[0] @ dense[place]
            + model.compute_lexical_matching_score(weights[0], weights[place])
            + model.colbert_score(vectors[0], vectors[place])
        )
        / 3
        for place in range(1, len(passages) + 1)
    ]


def reranker_logits(folder: Path, query: str, passages: list[str], max_length: int) -> list[float]:
    """The raw logits of transformers' classifier over padded pairs.

    (FlagEmbedding's `FlagReranker` gives the same, but turns ids back into text and tokenises again
    where transformers 5 runs, which changes some texts.)
    """
    tokenizer, model = _loaded(AutoModelForSequenceClassification, folder)
    logits: list[float] = []
    for begin in range(0, len(passages), _BATCH):
        batch = passages[begin : begin + _BATCH]
        inputs = tokenizer(
            [query] * len(batch),
            batch,
            truncation="only_second",
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            logits.extend(model(**inputs).logits[:, 0].tolist())
    return logits


def qwen_states(folder: Path, texts: list[str], max_length: int) -> FloatArray:
    """`[N, width]`: the last token's state, each text closed by one end token."""
    tokenizer, model = _loaded(AutoModel, folder, attn_implementation="eager")
    end = tokenizer.convert_tokens_to_ids(QWEN_END)
    rows = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"][: max_length - 1], end]
        for text in texts
    ]
    states = [output.last_hidden_state[:, -1] for output in padded(model, rows)]
    return torch.cat(states).numpy()


def qwen_scores(
    folder: Path,
    query: str,
    passages: list[str],
    max_length: int,
    instruction: str = DEFAULT_INSTRUCTION,
) -> list[float]:
    """The probability of yes, from the whole vocabulary's logits as the model card does it."""
    tokenizer, model = _loaded(AutoModelForCausalLM, folder, attn_implementation="eager")
    rows = qwen_rows(tokenizer, query, passages, max_length, instruction)
    answers = yes_and_no(tokenizer)
    logits = [output.logits[:, -1, answers] for output in padded(model, rows)]
    scores: list[float] = torch.cat(logits).softmax(dim=1)[:, 0].tolist()
    return scores


def yes_and_no(tokenizer: Any) -> list[int]:
    """The ids of the two answers."""
    return [tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")]


def qwen_rows(
    tokenizer: Any, query: str, passages: list[str], max_length: int, instruction: str
) -> list[list[int]]:
    """The model card's template filled in, token ids."""
    prefix = tokenizer.encode(PREFIX, add_special_tokens=False)
    suffix = tokenizer.encode(SUFFIX, add_special_tokens=False)
    room = max_length - len(prefix) - len(suffix)
    head = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
    contents = [
        tokenizer(head + passage, add_special_tokens=False)["input_ids"] for passage in passages
    ]
    return [prefix + content[:room] + suffix for content in contents]


def padded(model: Any, rows: list[list[int]], **inputs: Any) -> Iterator[Any]:
    """Transformers' own forward over left-padded batches."""
    for begin in range(0, len(rows), _BATCH):
        batch = rows[begin : begin + _BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            yield model(input_ids=ids, attention_mask=mask, position_ids=positions, **inputs)


@lru_cache(maxsize=1)
def _loaded(kind: Any, folder: Path, **options: str) -> tuple[Any, Any]:
    """The tokenizer and the model in float32; the last one stays loaded."""
    model = kind.from_pretrained(folder, dtype=torch.float32, **options)
    return AutoTokenizer.from_pretrained(folder), model.eval()


@lru_cache(maxsize=1)
def _m3(folder: Path, pooling: str) -> Any:
    return BGEM3FlagModel(str(folder), use_fp16=False, devices="cpu", pooling_method=pooling)


def _encode(model: Any, texts: list[str], max_length: int) -> dict[str, Any]:
    found: dict[str, Any] = model.encode(
        texts,
        batch_size=_BATCH,
        max_length=max_length,
        return_dense=True,
        return_sparse=True,
        return_colbert_vecs=True,
    )
    return found


def _without(separator: int, weights: dict[str, float]) -> dict[int, float]:
    return {int(key): float(value) for key, value in weights.items() if int(key) != separator}
