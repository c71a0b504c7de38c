"""Parts of transformers' modules that the backend computes: products, norms, attention, gates.

A part is recognised by its layers and by its results for a few numbers. A part that is not
recognised stays as it is. `auto_model` then compares the states of the whole module.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from smart_embedder.kernels.attention import PackedAttention
from smart_embedder.kernels.backend import (
    ACTIVATIONS,
    Backend,
    LayerNorm,
    Linear,
    RmsNorm,
    RotaryEmbedding,
    activate,
    make_linear,
)
from smart_embedder.models.families.backbone import attend_by_heads, run_in_row_blocks

# Types whose texts are packed. On a CPU a batch takes two thirds of the time of a padded one, and a
# short text alone takes two fifths.
PACKED_TYPES = {
    "distilbert", "electra", "embedding_gemma2_text", "eurobert", "gemma", "gemma3_text", "gte",
    "jina_embeddings_v3", "llama", "ministral", "mistral", "modernbert", "nomic_bert", "phi3",
    "qwen2", "qwen3",
}  # fmt: skip
# The names of an attention's layers: those that project its input, and the one for its output.
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("Wqkv",), ("q_lin", "k_lin", "v_lin"))
_OUTPUTS = (("o_proj",), ("Wo",), ("out_lin",))
_HEAD_NORMS = ("q_norm", "k_norm")
# Those of a gated feed-forward: gate, values and output; or gate and values as one layer.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("Wi", "Wo"))
# Arguments of a family's attention that packed attention does not compute.
_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "cache")
# The tolerance for recognising a function by its values; GELU and its approximation differ by 5e-4.
_ROUNDING = 1e-5


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    packed_attention: PackedAttention,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface, from `[1, H, T, D]` to `[1, T, H, D]`.

    Raises `ValueError` for options that packed attention does not support.
    """
    del attention_mask
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if unsupported:
        raise ValueError(f"the attention has {', '.join(unsupported)}")
    if is_causal is None:
        owners = (module, getattr(module, "config", None))
        is_causal = all(getattr(owner, "is_causal", True) for owner in owners)
    attend = partial(
        packed_attention,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=is_causal,
        window=sliding_window,
    )
    attended = attend_by_heads(attend, (query[0], key[0], value[0]), packed_attention.packed)
    return attended[None], None


class _RowsPart(nn.Module):
    """Replaces a part that computes each row by itself with `compute`."""

    # Some families read the dtype of the weight, if there is one.
    weight = None

    def __init__(self, compute: Linear) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, states: Tensor) -> Tensor:
        """Turn `[..., in]` into `[..., out]`."""
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        return self._compute(rows).view(*states.shape[:-1], -1)


class _Rotary(nn.Module):
    """Replaces a rotary embedding, which would round cosines and sines to the model's dtype."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self._source = source

    def forward(self, states: Tensor, *positions: Any, **options: Any) -> RotaryEmbedding:
        """Return the embedding of a packed row's tokens, in float32."""
        exact = states.new_empty(1, dtype=torch.float32)
        waves = self._source(exact, *positions, **options)
        half = waves[0].shape[-1] // 2
        cosines, sines = (wave[0, :, :half].contiguous() for wave in waves)
        return RotaryEmbedding(cosines, sines)


class _SelfAttention(nn.Module):
    """Replaces a self-attention over a packed row, with or without norms and rotation of heads.

    `heads` are the numbers of query, key and value heads, each `width` wide. `norm` normalises the
    heads that are rotated.
    """

    def __init__(
        self,
        source: nn.Module,
        projections: list[nn.Linear],
        output: list[nn.Linear],
        backend: Backend,
        *,
        heads: list[int],
        width: int,
        norm: RmsNorm,
    ) -> None:
        super().__init__()
        self._backend = backend
        self._width, self._heads = width, heads
        self._norm = norm
        self._project = backend.linear(projections)
        self._to_output = backend.linear(output)
        # Attributes that `attend_packed` reads, and arguments that a family's attention gives it.
        self.config: Any = source.config
        self.is_causal = getattr(source, "is_causal", True)
        self.scaling = getattr(source, "scaling", None)
        holder = source if hasattr(source, "sliding_window") else source.config
        self.sliding_window = getattr(holder, "sliding_window", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: RotaryEmbedding | None = None,
        attention_mask: object = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Turn states `[1, T, width]` into attended states of the same shape."""
        waves: tuple[Tensor, ...] = ()
        if position_embeddings is not None:
            waves = position_embeddings.cosines, position_embeddings.sines
        projected = run_in_row_blocks(self._project_and_rotate, hidden_states[0], *waves)
        query, key, value = torch.split(projected.transpose(0, 1), self._heads)
        attended, _ = attend_packed(
            self, query[None], key[None], value[None], attention_mask,
            scaling=self.scaling, sliding_window=self.sliding_window, **options,
        )  # fmt: skip
        return self._to_output(attended[0].flatten(1))[None], None

    def _project_and_rotate(self, states: Tensor, *waves: Tensor) -> Tensor:
        projected = self._project(states).view(len(states), -1, self._width)
        if waves:
            self._backend.rotary(projected, self._norm, RotaryEmbedding(*waves))
        return projected


class Match(NamedTuple):
    """How a part can be replaced: `make` makes the replacement, which needs these `operations`."""

    operations: tuple[str, ...]
    make: Callable[[Backend], nn.Module]


# Returns how the backend computes a part on states in a dtype, or None for other parts.
Rule = Callable[[nn.Module, torch.dtype], Match | None]


def _match_attention(module: nn.Module, dtype: torch.dtype) -> Match | None:
    projections = _find_layers(module, *_PROJECTIONS)
    output = _find_layers(module, *_OUTPUTS)
    width = getattr(module, "head_dim", getattr(module, "attention_head_size", None))
    if projections is None or output is None or not width or not hasattr(module, "config"):
        return None
    out = sum(layer.out_features for layer in projections)
    key_features = projections[1].out_features if len(projections) > 1 else out // 3
    key_heads = key_features // width
    heads = [out // width - 2 * key_heads, key_heads, key_heads]
    norms = [getattr(module, name) for name in _HEAD_NORMS if hasattr(module, name)]
    norm = _join_head_norms(norms, heads, width, projections[0].weight.new_empty(0, dtype=dtype))
    if norm is None or not _has_only(module, *projections, *output, *norms):
        return None
    layers = module, projections, output
    make = partial(_SelfAttention, *layers, heads=heads, width=width, norm=norm)
    return Match(("linear", "rotary"), make)


def _join_head_norms(
    norms: list[nn.Module], heads: list[int], width: int, like: Tensor
) -> RmsNorm | None:
    """Join the norms of query and key heads, on the device and in the dtype of `like`.

    Returns None if they cannot be joined.
    """
    if like.dtype is torch.float16:  # `RmsNorm.identity` does not exist in float16.
        return None
    if not norms:
        return RmsNorm.identity(heads[0] + heads[1], like.new_empty(width))
    matched = [norm for norm in (_read_rms_norm(norm, like.dtype) for norm in norms) if norm]
    if [norm.weight.shape for norm in matched] != [(width,)] * len(_HEAD_NORMS):
        return None
    weights = [norm.weight.expand(count, -1) for norm, count in zip(matched, heads, strict=False)]
    return RmsNorm(torch.cat(weights), matched[0].epsilon)


def _match_rotary(module: nn.Module, _: torch.dtype) -> Match | None:
    if not type(module).__name__.endswith("RotaryEmbedding"):
        return None
    return Match((), lambda _: _Rotary(module))


def _match_gated(module: nn.Module, _: torch.dtype) -> Match | None:
    """Match a gated feed-forward: `down(activation(gate(x)) up(x))`."""
    layers = _find_layers(module, *_GATED)
    if layers is None:
        return None
    functions = [child for child in module.children() if _find_activation(child)]
    if len(functions) != 1 or not _has_only(module, *layers, *functions):
        return None
    *first, down = layers
    if len(first) == 1:  # Divides the layer into two, without a copy.
        (gate_up,) = first
        biases = (None, None) if gate_up.bias is None else gate_up.bias.chunk(2)
        first = list(map(make_linear, gate_up.weight.chunk(2), biases))
    if [layer.out_features for layer in first] != [down.in_features] * 2:
        return None
    activation = _find_activation(functions[0]) or ""

    def make(backend: Backend) -> nn.Module:
        to_gate_up, to_output = backend.linear(first), backend.linear([down])

        def feed_forward(rows: Tensor) -> Tensor:
            return to_output(backend.gate(to_gate_up(rows), activation))

        return _RowsPart(partial(run_in_row_blocks, feed_forward))

    return Match(("linear", "gate"), make)


def _match_rows(module: nn.Module, dtype: torch.dtype) -> Match | None:
    """Match a product, a layer norm or an RMS norm, which compute each row by itself."""
    if type(module) is nn.Linear:
        return Match(("linear",), lambda backend: _RowsPart(backend.linear([module])))
    if (norm := _read_layer_norm(module)) is not None:
        return Match(("add_norm",), partial(_normalize_sum, norm))
    if (rms_norm := _read_rms_norm(module, dtype)) is not None:
        return Match(("rms_norm",), partial(_normalize_by_rms, rms_norm))
    return None


def _normalize_by_rms(norm: RmsNorm, backend: Backend) -> nn.Module:
    return _RowsPart(lambda rows: backend.rms_norm(rows, norm))


def _normalize_sum(norm: LayerNorm, backend: Backend) -> nn.Module:
    return _RowsPart(lambda rows: backend.add_norm(rows.clone(), rows, norm))


def _read_layer_norm(module: nn.Module) -> LayerNorm | None:
    """Return a layer norm for rows that are added to themselves, in place of that of PyTorch.

    On a CPU PyTorch's wakes its threads for a single row. The norm of twice the states with four
    times the epsilon is the norm of the states, to the last bit.
    """
    if type(module) is not nn.LayerNorm or not module.elementwise_affine:
        return None
    if len(module.normalized_shape) > 1 or module.weight.device.type != "cpu":
        return None
    weight = module.weight.detach().float()
    bias = torch.zeros_like(weight) if module.bias is None else module.bias.detach().float()
    return LayerNorm(weight, bias, 4 * module.eps)


@torch.inference_mode()
def _read_rms_norm(module: nn.Module, dtype: torch.dtype) -> RmsNorm | None:
    """Return the RMS norm that computes the same values as the module, or None.

    Some families add 1 to the weight.
    """
    weights = dict(module.named_parameters())
    epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if list(weights) != ["weight"] or weights["weight"].ndim != 1 or not isinstance(epsilon, float):
        return None
    stored = weights["weight"].detach().float().cpu()
    states = torch.randn(5, len(stored), generator=torch.Generator().manual_seed(0))
    try:
        outputs = functional_call(module, {"weight": stored}, (states,))
    except Exception:  # noqa: BLE001 - it is another part, which stays as it is
        return None
    for weight in (stored, 1 + stored):
        if _is_close(outputs, RmsNorm(weight, epsilon)(states)):
            return RmsNorm(weight.to(weights["weight"].device, dtype), epsilon)
    return None


@torch.inference_mode()
def _find_activation(module: nn.Module) -> str | None:
    """Return the name of the activation that computes the same values as the module, or None."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        return None
    inputs = torch.linspace(-6, 6, 97)
    try:
        outputs = module(inputs)
    except Exception:  # noqa: BLE001 - it is another part, which stays as it is
        return None
    known = filter(None, ACTIVATIONS)
    return next(
        (name for name in known if _is_close(outputs, activate(inputs.clone(), name))), None
    )


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=_ROUNDING, atol=_ROUNDING)


def _find_layers(module: nn.Module, *choices: tuple[str, ...]) -> list[nn.Linear] | None:
    """Return a module's linear layers by the first choice of names that it has all of.

    In the families that have them, layers that read the same input all have a bias, or none has.
    """
    for names in choices:
        found = [getattr(module, name, None) for name in names]
        layers = [layer for layer in found if type(layer) is nn.Linear]
        if len(layers) == len(names):
            return layers
    return None


def _has_only(module: nn.Module, *parts: nn.Module) -> bool:
    """Whether the module has no other children that compute, and no direct parameters."""
    others = [child for child in module.children() if not any(child is part for part in parts)]
    are_idle = all(isinstance(child, nn.Dropout | nn.Identity) for child in others)
    return are_idle and not list(module.parameters(recurse=False))


class Replacement(NamedTuple):
    """A part that can be replaced: the child `name` of `parent`."""

    parent: nn.Module
    name: str
    match: Match


def find_parts(module: nn.Module, dtype: torch.dtype, *, packed: bool) -> list[Replacement]:
    """Find the parts of a module that the backend can compute, on states in `dtype`.

    Attentions are replaced only if texts are packed, and get rotary embeddings in another form.
    """
    rules: list[Rule] = [_match_gated, _match_rows]
    if packed and any(_match_attention(part, dtype) for part in module.modules()):
        rules = [_match_attention, _match_rotary, *rules]
    return list(_find_in(module, dtype, rules))


def _find_in(module: nn.Module, dtype: torch.dtype, rules: Sequence[Rule]) -> Iterator[Replacement]:
    for name, child in module.named_children():
        matches = (rule(child, dtype) for rule in rules)
        if (match := next(filter(None, matches), None)) is not None:
            yield Replacement(module, name, match)
        else:
            yield from _find_in(child, dtype, rules)


def replace_parts(parts: list[Replacement], backend: Backend) -> None:
    """Replace parts in their modules one by one, and remove them from the list.

    So each replaced part is freed at once, and no weight is in memory twice.
    """
    while parts:
        part = parts.pop(0)
        setattr(part.parent, part.name, part.match.make(backend))
