"""Records what is read of a model's files, and says what is not.

Every tensor of an opened checkpoint, and every field of a `config.json`, is computed, is known to
have no effect, or is named: a tensor in an error, a field in a warning. The digests of the tensors
that were read identify the model.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch
from xxhash import xxh3_128_digest

from smart_embedder.errors import StartupError

log = structlog.get_logger(__name__)

# Tensors that no vector and no score depends on, unless a model's head reads them.
_TENSORS_WITHOUT_EFFECT = (
    # Buffers, which follow from the configuration.
    r"(^|\.)(position_ids|token_type_ids|inv_freq|num_batches_tracked|masked_bias)$",
    # The pooler of BERT and its relatives, which only classifiers read.
    r"(^|\.)pooler\.",
    # Heads of the language models as which encoders and decoders are trained.
    r"^(cls|lm_head|mlm_head|predictions|sop_classifier|discriminator_predictions)\.",
    r"^(generator_(predictions|lm_head)|vocab_(transform|layer_norm|projector))\.",
    r"^(head\.(dense|norm)|decoder)\.(weight|bias)$",
    # Heads of classifiers: the loader refuses a classifier that is no embedding model.
    r"^(pre_classifier|classifier|score|qa_outputs)\.",
)
# Fields that no state depends on: notes, training, generation, and heads that are read elsewhere.
_FIELDS_WITHOUT_EFFECT = {
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "dtype", "finetuning_task",
    "model_max_length", "model_type", "name_or_path", "prefix", "problem_type",
    "sbert_ce_default_activation_function", "sentence_transformers", "smart_embedder_demo",
    "smart_embedder_demo_recipe",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version",
    "attention_dropout", "attention_probs_dropout_prob", "classifier_dropout",
    "gradient_checkpointing", "hidden_dropout_prob", "initializer_range", "loss_function",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "output_past",
    "return_dict", "tf_legacy_loss", "torchscript", "use_bfloat16", "use_cache", "use_return_dict",
    "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "mask_token_id",
    "pad_token_id", "sep_token_id", "unk_token_id", "generation_config",
    "bos_token", "eos_token", "mask_token", "pad_token", "clf_pooling",
    "id2label", "label2id", "num_labels", "directionality", "pooler_fc_size",
    "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    # Of cross-attention, which encoders lack, and of weights that are stored anyhow.
    "add_cross_attention", "cross_attention_hidden_size", "is_encoder_decoder",
    "tie_encoder_decoder", "tie_word_embeddings",
    # Of attention windows, which use_sliding_window and layer_types turn on.
    "max_window_layers", "sliding_window",
    # Left over from other families; relative positions would have tensors of their own.
    "down_scale_factor", "gap_size", "layer_norm_eps", "n_ctx", "n_positions", "net_structure_type",
    "position_embedding_type", "tie_weights_",
    # Of rotary positions in older files, which are merged into the fields that are read.
    "rope_theta",
    # Of how a model of model2vec was made.
    "apply_pca", "apply_zipf", "cache_dir", "embedding_dtype", "hidden_dim", "pooling",
    "seq_length", "sif_coefficient", "tokenizer_name", "vocabulary_quantization",
    # Of modules of sentence-transformers, whose widths are those of their tensors.
    "embedding_dimension", "frozen", "word_embedding_dimension",
}  # fmt: skip

_current: ContextVar["ReadRecord | None"] = ContextVar("record", default=None)


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """What was found in the model's `folder`, and what of it was read.

    `digests` are those of the tensors that were read, by the names that their families use. The
    name of a tensor in a subfolder begins with the subfolder's; the `transformer`'s do not.
    """

    folder: Path
    transformer: Path
    digests: dict[str, bytes] = field(default_factory=dict)
    _tensors: dict[tuple[Path, str], torch.Size] = field(default_factory=dict)
    _read_tensors: set[tuple[Path, str]] = field(default_factory=set)
    _fields: dict[Path, set[str]] = field(default_factory=dict)
    _read_fields: dict[Path, set[str]] = field(default_factory=dict)

    def add_digest(self, folder: Path, name: str, digest: bytes) -> None:
        """Add the digest of a tensor of a file in `folder`."""
        if folder not in {self.folder, self.transformer}:
            # Resolved, because modules.json may have an absolute path.
            below = folder.resolve().relative_to(self.folder.resolve())
            name = (below / name).as_posix()
        self.digests[name] = digest

    def combine_digests(self, names: Iterable[str], *others: object) -> bytes:
        """Compute the digest of these tensors, and of the `repr` of `others`."""
        lines = [f"{name!r} {self.digests[name].hex()}" for name in sorted(names)]
        return xxh3_128_digest("\n".join([*lines, *map(repr, others)]).encode())

    def find_tensor(self, file: Path, name: str, shape: torch.Size) -> None:
        """Record that the file has a tensor, by the name that it has there."""
        self._tensors[file, name] = shape

    def read_tensor(self, file: Path, name: str) -> None:
        """Record that the numbers of a tensor were read."""
        self._read_tensors.add((file, name))

    def leave_out(self, patterns: Collection[str]) -> None:
        """Record that the model needs no tensor whose name matches one of these patterns."""
        self._read_tensors.update(key for key in self._tensors if _matches(key[1], patterns))

    def watch(self, path: Path, config: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the configuration in a file, whose fields are recorded when read."""
        self._fields[path] = set(config)
        return _WatchedFields(config, self._read_fields.setdefault(path, set()))

    def read_all_fields(self, path: Path, unknown: Collection[str]) -> None:
        """Record that transformers reads all fields of a file but those that it does not know."""
        self._read_fields.setdefault(path, set()).update(self._fields.get(path, set()) - {*unknown})

    def require_all_read(self) -> None:
        """Raise `StartupError` for tensors that were not read, and log fields that were not."""
        unread = [
            (file, name)
            for file, name in self._tensors.keys() - self._read_tensors
            if not _matches(name, _TENSORS_WITHOUT_EFFECT)
        ]
        if unread:
            file, name = min(unread)
            shape = " x ".join(map(str, self._tensors[file, name])) or "one number"
            others = f", and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise StartupError(
                f"the checkpoint in {file.parent} has the tensor {name} ({shape}){others}, which "
                "this model does not compute: its results would be others than those it was "
                "trained for"
            )
        for path, names in self._fields.items():
            ignored = sorted(names - self._read_fields[path] - _FIELDS_WITHOUT_EFFECT)
            if ignored:
                log.warning(
                    "config_fields_not_read",
                    file=path.relative_to(self.folder.parent).as_posix(),
                    fields=ignored,
                    detail="the model is computed as if they were not there",
                )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


class _WatchedFields(dict[str, Any]):
    """A configuration that adds the fields that are read to a set."""

    def __init__(self, config: dict[str, Any], read: set[str]) -> None:
        super().__init__(config)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)


@contextmanager
def record_reading(folder: Path, transformer: Path) -> Iterator[ReadRecord]:
    """Record what of the model in `folder` is found in the block, and read there or later."""
    record = ReadRecord(folder, transformer)
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


def current_record() -> ReadRecord | None:
    """Return the record of the enclosing `record_reading`, if there is one."""
    return _current.get()
