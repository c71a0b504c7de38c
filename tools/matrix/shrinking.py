"""Shrinks configurations of transformers by the names of their fields.

A shrunken model has a few layers, at least one of each kind, and small widths. A rule reads the
name of a field, so that a new family needs no rule of its own.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

VOCABULARY = 480
# The ids that the tokenizer gives to its special tokens.
PAD, UNKNOWN, START, END, MASK = range(5)
_IDS = {
    "pad": PAD, "unk": UNKNOWN, "bos": START, "cls": START, "decoder_start": START, "eos": END,
    "sep": END, "mask": MASK,
}  # fmt: skip
_TOKEN = re.compile(r"_?(?:(\w+)_)?token_(?:id|index)|(\w+)_index")
_LAYERS = re.compile(
    r"((n|num)_)?((conf_|text_|speech_|t2u_)?(hidden|encoder|decoder)_)?"
    r"(layers?|depth|num_blocks|num_layers)"
)
# Lists of layers. A mapping of them has layers as its keys.
_OF_LAYERS = re.compile(r"\w*(ind(ic)?es|idxs?|layers|layer_ids)")
_BY_LAYER = re.compile(r"\w*per_layer_config")
_FEWEST_LAYERS, _MOST_LAYERS = 2, 4
_SHARED_LAYERS = "num_kv_shared_layers"
HEAD_WIDTH = 16
_HEADS = 4
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Fields that a model needs, and that its default configuration may leave out.
_DEFAULTS = {
    "vocab_size": VOCABULARY, "head_dim": HEAD_WIDTH, "num_key_value_heads": _HEADS,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_WIDTH, "indexer_budget": 32, "indexer_compress_ratio": 4,
}  # fmt: skip
# Fields that a few models need, although their default configuration leaves them out.
_MISSING = {
    "pad_token_id": PAD, "decoder_start_token_id": PAD, "vision_start_token_id": VOCABULARY,
    "default_language": "en_XX", "sliding_window": 16, "moe_intermediate_size": 64,
    "num_experts": 4, "top_k_experts": 2, "n_shared_experts": 1,
}  # fmt: skip
_KINDS = {"layer_types": ["conv", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
# The most that a field with such a name may have, as a number or in widths of a head. The first
# rule that matches counts.
_NUMBERS, _WIDTHS = (
    [(re.compile(rf"(\w+_)?({names})"), limit) for names, limit in rules.items()]
    for rules in (
        {
            r"vocab_sizes?\w*|vocab|hash_buckets": VOCABULARY,
            r"experts_per_tok(en)?|top_?k|moe_k": 2,
            r"shared_experts|topk_group|offset": 1,
            r"n_group|expert_group|period": 2,
            r"experts?|expert_num": 4,
            r"kpool": 2,
            r"max_position_embeddings|n_positions|n_ctx|max_seq_len|positions?": 256,
            r"window|window_size|window_len|chunk_size|chunk_length|local_attention": 16,
            r"block_size": 16,
            r"key_value_heads|kv_heads|kv_n_heads|num_key_heads": 2,
            r"mamba_n_heads|n_mamba_heads|mamba_num_heads": 2 * _HEADS,
            r"(?<!d_)heads?|heads_per_layer": _HEADS,
            r"state(_size)?|rank|lowrank": HEAD_WIDTH,
        },
        {
            r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim": 0.5,
            r"coordinate_size|shape_size": 2 / 3,
            r"attention_head_dim": 2,
            r"attention_hidden_size": 2 * _HEADS,
            r"head_?(dim|size)|d_kv|d_head|kv_channels": 1,
            r"intermediate\w*|ffn\w*|ff|dff|d_inner|mlp_dim|feed_forward\w*": 2 * _HEADS,
            r"hidden_size\w*|dim|dims|d_model|n_embd|embedding_size|width|bottleneck_size": _HEADS,
            r"d_ssm": _HEADS,
        },
    )
)


def _find_head_width(config: Mapping[str, Any]) -> int:
    """Return the width of a head, of the text part in a composite configuration."""
    config = config.get("text_config") or config
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return int(config.get("head_dim") or (width // heads if width and heads else HEAD_WIDTH))


class Shrinker:
    """Makes all sizes of a configuration small, also those of its parts.

    Widths are multiples of `head_width`. Tokens that no text contains, such as that of an image,
    get ids from the vocabulary's end. If it `completes`, it adds fields that a few models need.
    """

    def __init__(self, head_width: int = HEAD_WIDTH, *, completes: bool = False) -> None:
        self._head_width = head_width
        self._completes = completes
        self._unused_ids = iter(range(VOCABULARY - 1, MASK, -1))

    def shrink(
        self, config: Mapping[Any, Any], whole: Mapping[Any, Any] | None = None
    ) -> dict[Any, Any]:
        """Return the configuration with small sizes; `whole` is the one that it is part of."""
        whole = config if whole is None or "hidden_size" in config else whole
        if self._completes and "model_type" in config:
            missing = {name: value for name, value in _MISSING.items() if config.get(name) is None}
            # Kinds of layers are only for a configuration that has them.
            layers = {name: value for name, value in _KINDS.items() if config.get(name, ()) is None}
            config = {**config, **missing, **layers}
        count, kept = _choose_layers(config)
        small: dict[Any, Any] = {}
        for name, value in config.items():
            if isinstance(value, Mapping):
                by_layer = {new: _of_layer(value, old) for new, old in enumerate(kept)}
                chosen = {layer: part for layer, part in by_layer.items() if part is not None}
                small[name] = self.shrink(
                    chosen if _BY_LAYER.fullmatch(str(name)) else value, whole
                )
                if name == "rope_parameters" and not value:  # A default that some leave out.
                    kinds = config.get("layer_types") or ()
                    small[name] = {kind: dict(_ROPE) for kind in kinds} or dict(_ROPE)
                if self._completes and "rope_theta" in small[name]:
                    half = self._head_width * value.get("partial_rotary_factor", 1) / 2
                    small[name] = dict(value) | {"mrope_section": _divide([3, 3, 2], int(half))}
            elif isinstance(value, list | tuple):
                small[name] = self._shrink_list(name, _keep(name, value, count, kept), whole)
            elif name == _SHARED_LAYERS:
                small[name] = sum(layer >= count - value for layer in kept)
            elif _is_count_of_layers(name, value):
                small[name] = min(value, len(kept) if value == count else _FEWEST_LAYERS)
            else:
                small[name] = self._shrink_number(str(name), value, config)
        return small

    def _shrink_list(self, name: str, values: Sequence[Any], config: Mapping[str, Any]) -> Any:
        numbers = [value for value in values if type(value) is int]
        if numbers and name == "mrope_section":
            return _divide(numbers, sum(numbers) * self._head_width // _find_head_width(config))
        if numbers and sum(numbers) == config.get("hidden_size"):
            return _divide(numbers, _HEADS * self._head_width)
        return [self._shrink_number(name, value, config) for value in values]

    def _shrink_number(self, name: str, value: Any, config: Mapping[str, Any]) -> Any:
        if value is None and name in _DEFAULTS:
            return self._head_width if name == "head_dim" else _DEFAULTS[name]
        if type(value) is not int or value <= 0:
            return value
        if match := _TOKEN.fullmatch(name):
            known = _IDS.get(match[1] or match[2])
            return next(self._unused_ids) if known is None else known
        if name == "head_dim" and value == config.get("qk_rope_head_dim"):
            name = "qk_rope_head_dim"
        if name == "num_heads" and "expand" in config:  # The heads of a recurrence.
            return 2 * _HEADS
        if name.endswith("heads") and value == config.get("num_attention_heads"):
            return min(value, _HEADS)
        widths = [(pattern, int(heads * self._head_width)) for pattern, heads in _WIDTHS]
        limits = (limit for pattern, limit in [*_NUMBERS, *widths] if pattern.fullmatch(name))
        return min(value, int(next(limits, value)))


def _choose_layers(config: Mapping[Any, Any]) -> tuple[int, list[int]]:
    """Return the number of layers and those that are kept: one of each kind first."""
    counts = (value for name, value in config.items() if _is_count_of_layers(name, value))
    count = next(counts, 0)
    unshared = count - (config.get(_SHARED_LAYERS) or 0)
    lists = [v for v in config.values() if isinstance(v, list | tuple) and len(v) == count]
    mappings = [v for k, v in config.items() if _BY_LAYER.fullmatch(str(k)) and v]
    kinds: dict[str, int] = {}
    for layer in range(count):
        options = [values[layer] for values in lists], [_of_layer(v, layer) for v in mappings]
        kinds.setdefault(repr((layer < unshared, options)), layer)
    chosen = list(kinds.values())[:_MOST_LAYERS]
    others = [layer for layer in range(count) if layer not in chosen]
    return count, sorted(chosen + others[: max(0, _FEWEST_LAYERS - len(chosen))])


def _is_count_of_layers(name: Any, value: Any) -> bool:
    return type(value) is int and value > 0 and bool(_LAYERS.fullmatch(str(name)))


def _of_layer(by_layer: Mapping[Any, Any], layer: int) -> Any:
    return next(
        (part for key, part in by_layer.items() if str(key).isdigit() and int(key) == layer), None
    )


def _keep(name: str, values: Sequence[Any], count: int, kept: list[int]) -> Sequence[Any]:
    """Return the part of a list that is for the kept layers, or that names them."""
    if count and len(values) == count:
        return [values[layer] for layer in kept]
    if count and values and _OF_LAYERS.fullmatch(name):
        return [new for new, old in enumerate(kept) if old in values]
    return values


def _divide(values: Sequence[int], total: int) -> list[int]:
    """Divide `total` in the proportions of `values`."""
    ends = [round(sum(values[:end]) * total / sum(values)) for end in range(len(values) + 1)]
    return [end - start for start, end in pairwise(ends)]
