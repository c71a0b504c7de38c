"""Parts of transformers' modules that the backend computes: products, norms, attention, gates.

What a part is, is told by what it holds and by what it computes of a few numbers, not by its
family; what is not understood stays as it is. Whether the model is still computed as before is for
the trial of the whole (`transformers_module`) to say.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

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

# Names that the layers of an attention have: what projects its input, and what its output.
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("Wqkv",), ("q_lin", "k_lin", "v_lin"))
_OUTPUTS = (("o_proj",), ("Wo",), ("out_lin",))
_HEAD_NORMS = ("q_norm", "k_norm")
# Those of a gated feed-forward: the gate, what passes it, and the output; or the first two as one.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("Wi", "Wo"))
# Arguments of a family's attention that packed attention does not compute.
_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "cache")
# How much a function of a few numbers may differ from the one that it is taken for: GELU differs
# from its approximation by 5e-4.
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
    **others: Any,
) -> tuple[Tensor, None]:
    """For transformers, `[1, H, T, D]` to `[1, T, H, D]`; raises `ValueError` for options."""
    del attention_mask
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
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
    """In place of a part that treats each row by itself: what `compute` makes of the rows."""

    # Some families look at its dtype, if there is one.
    weight = None

    def __init__(self, compute: Linear) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        return self._compute(rows).view(*states.shape[:-1], -1)


def _product(layer: nn.Linear, backend: Backend) -> nn.Module:
    return _RowsPart(backend.linear([layer]))


def _rms_norm(norm: RmsNorm, backend: Backend) -> nn.Module:
    return _RowsPart(lambda rows: backend.rms_norm(rows, norm))


def _layer_norm(source: nn.LayerNorm, backend: Backend) -> nn.Module:
    """In place of `nn.LayerNorm` on a CPU, where PyTorch's wakes its threads for a single row.

    The norm of twice the states is theirs to the last bit, with four times the epsilon.
    """
    weight = source.weight.detach().float()
    bias = torch.zeros_like(weight) if source.bias is None else source.bias.detach().float()
    norm = LayerNorm(weight, bias, 4 * source.eps)
    return _RowsPart(lambda rows: backend.add_norm(rows.clone(), rows, norm))


def _gated(
    gate_and_up: list[nn.Linear], down: nn.Linear, activation: str, backend: Backend
) -> nn.Module:
    """In place of a gated feed-forward: `down(activation(gate(x)) up(x))`."""
    to_both, to_output = backend.linear(gate_and_up), backend.linear([down])

    def feed_forward(rows: Tensor) -> Tensor:
        return to_output(backend.gate(to_both(rows), activation))

    return _RowsPart(partial(run_in_row_blocks, feed_forward))


class _Rotary(nn.Module):
    """In place of a rotary embedding, which rounds cosines and sines to the model's format."""

    def __init__(self, source: nn.Module, _: Backend) -> None:
        super().__init__()
        self._source = source

    def forward(self, states: Tensor, *positions: Any, **options: Any) -> RotaryEmbedding:
        """That of the tokens of one row."""
        exact = states.new_empty(1, dtype=torch.float32)
        waves = self._source(exact, *positions, **options)
        half = waves[0].shape[-1] // 2
        cosines, sines = (each[0, :, :half].contiguous() for each in waves)
        return RotaryEmbedding(cosines, sines)


class _SelfAttention(nn.Module):
    """In place of a self-attention over a packed row; heads may be normalised and rotated.

    `heads` are the numbers of query, key and value heads, each `width` wide. `norm` is that of the
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
        # What `attend_packed` asks a family's attention for, and what that passes on.
        self.config: Any = source.config
        self.is_causal = getattr(source, "is_causal", True)
        self.scaling = getattr(source, "scaling", None)
        own = source if hasattr(source, "sliding_window") else source.config
        self.sliding_window = getattr(own, "sliding_window", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: RotaryEmbedding | None = None,
        attention_mask: object = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """`[1, T, width]` to the same."""
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


# What makes a part's replacement.
Make = Callable[[Backend], nn.Module]


def _match_attention(module: nn.Module, dtype: torch.dtype) -> Make | None:
    """For a self-attention; None if it is none, or has more than is computed here."""
    projections = _find_layers(module, *_PROJECTIONS)
    output = _find_layers(module, *_OUTPUTS)
    width = getattr(module, "head_dim", getattr(module, "attention_head_size", None))
    if projections is None or output is None or not width or not hasattr(module, "config"):
        return None
    out = sum(each.out_features for each in projections)
    of_keys = projections[1].out_features if len(projections) > 1 else out // 3
    heads = [out // width - 2 * (of_keys // width), *[of_keys // width] * 2]
    norms = [getattr(module, name) for name in _HEAD_NORMS if hasattr(module, name)]
    norm = _join_head_norms(norms, heads, width, projections[0].weight.new_empty(0, dtype=dtype))
    if norm is None or not _has_only(module, *projections, *output, *norms):
        return None
    layers = module, projections, output
    return partial(_SelfAttention, *layers, heads=heads, width=width, norm=norm)


def _join_head_norms(
    norms: list[nn.Module], heads: list[int], width: int, like: Tensor
) -> RmsNorm | None:
    """One norm of all heads that are rotated, where and as exact as `like`; None if none can be."""
    if like.dtype is torch.float16:  # It has no norm that changes nothing.
        return None
    if not norms:
        return RmsNorm.identity(heads[0] + heads[1], like.new_empty(width))
    of_heads = [_match_rms_norm(each, like.dtype) for each in norms]
    weights = [
        each.weight.expand(count, -1)
        for each, count in zip(of_heads, heads, strict=False)
        if each is not None and each.weight.shape == (width,)
    ]
    if len(weights) < len(_HEAD_NORMS):
        return None
    return RmsNorm(torch.cat(weights), next(each.epsilon for each in of_heads if each is not None))


def _match_gated(module: nn.Module) -> Make | None:
    """For a gated feed-forward; None if it is none, or has more than is computed here."""
    layers = _find_layers(module, *_GATED)
    if layers is None:
        return None
    functions = [each for each in module.children() if _match_activation(each)]
    if len(functions) != 1 or not _has_only(module, *layers, *functions):
        return None
    *first, down = layers
    if len(first) == 1:  # Two layers that share the memory of one.
        (both,) = first
        biases = (None, None) if both.bias is None else both.bias.chunk(2)
        first = list(map(make_linear, both.weight.chunk(2), biases))
    if [each.out_features for each in first] != [down.in_features] * 2:
        return None
    return partial(_gated, first, down, _match_activation(functions[0]) or "")


def _find_layers(module: nn.Module, *choices: tuple[str, ...]) -> list[nn.Linear] | None:
    """The linear layers of the first choice of names whose layers the module has.

    Layers side by side all have a bias, or none has: the last one has an input of its own.
    """
    for names in choices:
        found = [getattr(module, name, None) for name in names]
        layers = [each for each in found if type(each) is nn.Linear]
        if len(layers) == len(names):
            return layers
    return None


def _has_only(module: nn.Module, *parts: nn.Module) -> bool:
    """Whether it has no other parts that compute, and no parameters of its own."""
    others = [each for each in module.children() if not any(each is part for part in parts)]
    idle = all(isinstance(each, nn.Dropout | nn.Identity) for each in others)
    return idle and not list(module.parameters(recurse=False))


@torch.inference_mode()
def _match_activation(module: nn.Module) -> str | None:
    """The name of the activation that it is, told by its values."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        return None
    inputs = torch.linspace(-6, 6, 97)
    try:
        outputs = module(inputs)
    except TypeError:  # It takes more than states.
        return None
    known = filter(None, ACTIVATIONS)
    return next(
        (name for name in known if _is_close(outputs, activate(inputs.clone(), name))), None
    )


@torch.inference_mode()
def _match_rms_norm(module: nn.Module, dtype: torch.dtype) -> RmsNorm | None:
    """The RMS norm that it is, told by its values; some families' weights are to be added to 1."""
    weights = dict(module.named_parameters())
    epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if list(weights) != ["weight"] or weights["weight"].ndim != 1 or not isinstance(epsilon, float):
        return None
    if isinstance(module, nn.LayerNorm):
        return None
    own = weights["weight"].detach().float().cpu()
    states = torch.randn(5, len(own), generator=torch.Generator().manual_seed(0))
    outputs = functional_call(module, {"weight": own}, (states,))
    for weight in (own, 1 + own):
        if _is_close(outputs, RmsNorm(weight, epsilon)(states)):
            return RmsNorm(weight.to(weights["weight"].device, dtype), epsilon)
    return None


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=_ROUNDING, atol=_ROUNDING)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A part that can be replaced: where it is, by what, and the operations that this takes."""

    parent: nn.Module
    name: str
    make: Make
    operations: tuple[str, ...]


def find_parts(module: nn.Module, dtype: torch.dtype, *, packed: bool) -> list[Replacement]:
    """The parts of a module that the backend can compute, on states in `dtype`.

    Attention is replaced in a packed layout alone, and only if all of it can be: what heads are
    rotated by is given to it in another form then.
    """
    attentions: dict[nn.Module, Make] = {}
    if packed:
        found = {each: _match_attention(each, dtype) for each in module.modules()}
        attentions = {each: make for each, make in found.items() if make is not None}
        if not attentions.keys() >= set(_find_rotating(module)):
            attentions = {}
    return list(_find_in(module, dtype, attentions))


def _find_in(
    module: nn.Module, dtype: torch.dtype, attentions: dict[nn.Module, Make]
) -> Iterator[Replacement]:
    for name, child in module.named_children():
        place = partial(Replacement, module, name)
        if child in attentions:
            yield place(attentions[child], ("linear", "rotary"))
        elif attentions and type(child).__name__.endswith("RotaryEmbedding"):
            yield place(partial(_Rotary, child), ())
        elif (gated := _match_gated(child)) is not None:
            yield place(gated, ("linear", "gate"))
        elif type(child) is nn.Linear:
            yield place(partial(_product, child), ("linear",))
        elif isinstance(child, nn.LayerNorm) and _can_replace(child):
            yield place(partial(_layer_norm, child), ("add_norm",))
        elif (norm := _match_rms_norm(child, dtype)) is not None:
            yield place(partial(_rms_norm, norm), ("rms_norm",))
        else:
            yield from _find_in(child, dtype, attentions)


def _can_replace(norm: nn.LayerNorm) -> bool:
    """Whether it is on a CPU, of the last dimension, and has a weight."""
    usual = type(norm) is nn.LayerNorm and norm.elementwise_affine
    return usual and len(norm.normalized_shape) == 1 and norm.weight.device.type == "cpu"


def _find_rotating(module: nn.Module) -> Iterator[nn.Module]:
    """The innermost parts that are given what heads are rotated by."""
    takes = {
        each: "position_embeddings" in inspect.signature(each.forward).parameters
        for each in module.modules()
    }
    for each, is_given in takes.items():
        inner = (takes[part] for part in each.modules() if part is not each)
        if is_given and not any(inner):
            yield each


def replace_parts(parts: list[Replacement], backend: Backend) -> None:
    """Replace parts in their modules, one after the other; the list is empty then.

    Nothing holds on to what was replaced, so that no weight is held twice.
    """
    while parts:
        part = parts.pop(0)
        setattr(part.parent, part.name, part.make(backend))
