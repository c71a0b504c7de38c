"""Attention within the sequences of a packed batch: the interface, the kernels, choice by name.

The file has three parts: attention on dense blocks, of sequences of equal length or of padded short
ones; attention by kernels that take sequences of any lengths; and two cases that no kernel covers
alone, a window that the kernel does not support and sequences that end in unattended tokens.
"""

import importlib
from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from itertools import pairwise, product
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import LengthClass, PackedBatch, Padding

# Query [H, T, D], key and value [Hkv, T, D]. In a block: [N, H, L, D] and [N, Hkv, L, D].
QueryKeyValue = tuple[Tensor, Tensor, Tensor]
# (states, output, *, scale, mask): attention within a block of N sequences of L tokens. Fills
# `output` [N, H, L, D]. `mask` [N, 1, 1, L] is added to the scores, unless it is None.
BlockAttention = Callable[..., None]


class Attention(Protocol):
    """Attention within each sequence of a packed batch.

    If an implementation also has an argument `window`, each token attends only to tokens that are
    less than `window` tokens away.
    """

    def __call__(
        self, states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool
    ) -> Tensor:
        """Return `[T, H, D]` for query `[H, T, D]`, key and value `[Hkv, T, D]`; Hkv divides H."""


def eager(states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool) -> Tensor:
    """Pad every sequence to the longest one, then matmul, mask, softmax, matmul."""
    query, key, value = states
    group = query.shape[0] // key.shape[0]
    q = _pad_rows(query, packed).float()
    k = _pad_rows(key, packed).float().repeat_interleave(group, dim=1)
    v = _pad_rows(value, packed).float().repeat_interleave(group, dim=1)
    position = torch.arange(packed.max_length, device=query.device)
    lengths = torch.tensor(packed.lengths, device=query.device)
    visible = (position < lengths[:, None])[:, None, None, :]
    if causal:
        visible = visible & (position <= position[:, None])
    scores = (q @ k.transpose(-1, -2)) * scale
    padded = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v
    rows = [padded[i, :, :length] for i, length in enumerate(packed.lengths)]
    return torch.cat(rows, dim=1).transpose(0, 1).to(query.dtype)


def _pad_rows(states: Tensor, packed: PackedBatch) -> Tensor:
    """Turn `[H, T, D]` into `[N, H, longest, D]`, with zeros behind shorter sequences."""
    rows = torch.split(states.transpose(0, 1), packed.lengths)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True).transpose(1, 2)


def sdpa(states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool) -> Tensor:
    """Implement `Attention` with PyTorch's fused operator, on every device."""
    return _attend_in_blocks(partial(attend_by_sdpa, causal=causal), states, packed, scale=scale)


def attend_by_sdpa(
    states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor | None, causal: bool
) -> None:
    """Implement `BlockAttention` with PyTorch's fused operator."""
    query, key, value = states
    output[:] = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        # A causal query never attends to padding, which comes after the tokens.
        attn_mask=None if causal else mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_in_blocks(
    attend: BlockAttention, states: QueryKeyValue, packed: PackedBatch, *, scale: float
) -> Tensor:
    """Call `attend` for each block of `packed`; return `[T, H, D]`.

    Rows of tokens that only round T up are zero.
    """
    heads, tokens, _ = states[0].shape
    output = states[0].new_empty(tokens, heads, states[2].shape[2])
    for block in packed.blocks:
        if block.padding is None:
            # Views [count, H, length, D] of the sequences, which have one length.
            query, key, value, dense = (
                tensor[:, block.start : block.stop]
                .view(len(tensor), -1, block.length, tensor.shape[-1])
                .transpose(0, 1)
                for tensor in (*states, output.transpose(0, 1))
            )
            attend((query, key, value), dense, scale=scale, mask=None)
        else:
            attended = output[block.start : block.stop]
            attend_padded(attend, states, block.padding, attended, scale=scale)
    output[packed.real_tokens :] = 0
    return output


def attend_padded(
    attend: BlockAttention, states: QueryKeyValue, padding: Padding, output: Tensor, *, scale: float
) -> None:
    """Call `attend` on padded, masked copies of the sequences; fill `output` `[tokens, H, D]`."""
    padded = []
    for tensor in states:
        slots = tensor.transpose(0, 1).index_select(0, padding.token_of_slot)
        slots = slots.view(padding.count, padding.length, *slots.shape[1:])
        padded.append(slots.transpose(1, 2))
    query, key, value = padded
    attended = query.new_empty(padding.count, padding.length, query.shape[1], value.shape[-1])
    mask = padding.mask.to(query.dtype)
    attend((query, key, value), attended.transpose(1, 2), scale=scale, mask=mask)
    torch.index_select(attended.flatten(0, 1), 0, padding.slots, out=output)


# Scores in memory at a time: 4 MiB, which stay in the cache.
_MAX_SCORES = 2**21
# With fewer scores, as for a single query or a small model, one call of PyTorch's is faster.
_FEW_SCORES = 2**16
# With fewer queries at a time, all keys and values would be read too often.
_MIN_QUERIES = 256


def matmul(states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool) -> Tensor:
    """Implement `Attention` with matrix products; leaves causal and grouped attention to `sdpa`."""
    if causal or len(states[0]) != len(states[1]):
        return sdpa(states, packed, scale=scale, causal=causal)
    return _attend_in_blocks(attend_by_matmul, states, packed, scale=scale)


def attend_by_matmul(
    states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor | None
) -> None:
    """Implement `BlockAttention` with matrix products, neither causal nor with grouped heads."""
    count, heads, length, _ = output.shape
    if count * heads * length * length < _FEW_SCORES:
        attend_by_sdpa(states, output, scale=scale, mask=mask, causal=False)
        return
    sequences = max(1, _MAX_SCORES // (heads * length * length))
    for start in range(0, count, sequences):
        chosen = slice(start, start + sequences)
        # Contiguous: the products below are far slower on a view of the projection.
        query = (states[0][chosen] * scale).contiguous()
        key, value = (tensor[chosen].contiguous() for tensor in states[1:])
        num_heads = max(1, min(heads, _MAX_SCORES // (len(query) * _MIN_QUERIES * length)))
        num_rows = max(1, _MAX_SCORES // (len(query) * num_heads * length))
        for head, row in product(range(0, heads, num_heads), range(0, length, num_rows)):
            group, rows = slice(head, head + num_heads), slice(row, row + num_rows)
            scores = _multiply(query[:, group, rows], key[:, group].transpose(-1, -2))
            if mask is not None:
                scores += mask[chosen]
            output[chosen, group, rows] = _multiply(scores.softmax(dim=-1), value[:, group])


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Compute `left @ right` for `[N, H, ...]`; `@` itself would copy the keys of a long text."""
    product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return product.view(*left.shape[:2], *product.shape[1:])


FLASH_MODULES = {
    "flash_attention_2": ("flash_attn", "the package flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "FlashAttention 3 (flash_attn_interface)"),
}


def load_attention(name: str) -> Attention:
    """Return the attention that ATTENTION names, except `native`, which needs a library.

    Raises `StartupError` if its package is missing.
    """
    if name in FLASH_MODULES:
        module, package = FLASH_MODULES[name]
        try:
            kernel = importlib.import_module(module).flash_attn_varlen_func
        # A package that was built for another PyTorch lacks symbols.
        except (ImportError, OSError, AttributeError) as error:
            raise StartupError(
                f"ATTENTION={name} needs {package}, which is not installed or was built for "
                f"another PyTorch: {error}"
            ) from error
        return partial(_flash_attention, kernel)
    if name == "native":
        raise StartupError(
            "ATTENTION=native needs the kernels in C, which are not built, or do not run on this "
            "processor; build them with python -m smart_embedder.kernels.build"
        )
    known: dict[str, Attention] = {"varlen": varlen, "sdpa": sdpa, "matmul": matmul, "eager": eager}
    return known[name]


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashAttention's kernels run on `device` in `dtype`: NVIDIA's Ampere or newer."""
    if device.type != "cuda" or dtype not in {torch.float16, torch.bfloat16}:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def require_attention_support(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `StartupError` if the attention `name` cannot run on `device` in `dtype`."""
    if name in {"varlen", *FLASH_MODULES}:
        runs = has_flash_attention(device, dtype)
        needed = "an NVIDIA GPU of compute capability 8.0 or newer, and float16 or bfloat16"
    else:
        runs, needed = name != "native" or device.type == "cpu", "a CPU"
    if runs:
        return
    where = device.type
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"cuda, which has {major}.{minor}"
    raise StartupError(
        f"ATTENTION={name} needs {needed}, but the model runs in "
        f"{str(dtype).removeprefix('torch.')} on {where}; set ATTENTION to auto"
    )


def _flash_attention(
    kernel: Callable[..., Any],
    states: QueryKeyValue,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Implement `Attention` with a kernel that has the arguments of `flash_attn_varlen_func`."""
    # The number of tokens before and after its own that a token attends to; -1 means all.
    reach = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: LengthClass) -> Tensor:
        bounds, longest = sequences.bounds, sequences.longest
        output: Tensor | tuple[Tensor, ...] = kernel(
            query, key, value, bounds, bounds, longest, longest,
            softmax_scale=scale, causal=causal, window_size=reach,
        )  # fmt: skip
        # FlashAttention 3 also returns the log-sum-exp.
        return output[0] if isinstance(output, tuple) else output

    return attend_by_length(attend, states, packed)


def _varlen_kernel(
    *states_and_lengths: Tensor | int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Call the kernel of `torch.nn.attention.varlen` directly.

    That module takes a second to import, and fills a tensor with zeros at every call.
    """
    left, right = window_size
    output: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        *states_and_lengths, 0.0, causal, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return output


varlen = partial(_flash_attention, _varlen_kernel)


def attend_by_length(
    attend: Callable[[Tensor, Tensor, Tensor, LengthClass], Tensor],
    states: QueryKeyValue,
    packed: PackedBatch,
) -> Tensor:
    """Call `attend` for each length class, with its tokens `[tokens, H, D]`; return `[T, H, D]`.

    Query, key and value in `states` are `[H, T, D]`. `attend` gets views of them.
    """
    query, key, value = (tensor.transpose(0, 1) for tensor in states)
    outputs = []
    for sequences in packed.length_classes:
        tokens = slice(sequences.start, sequences.stop)
        outputs.append(attend(query[tokens], key[tokens], value[tokens], sequences))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


# Values of `CustomMaskType` in PyTorch's kernel.
_NO_MASK, _CAUSAL = 0, 1


def memory_efficient(
    states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool
) -> Tensor:
    """Implement `Attention` with PyTorch's memory-efficient kernel.

    `scaled_dot_product_attention` calls this kernel, too. Called directly, it takes sequences of
    different lengths in one call. It does not support grouped heads, so keys and values are copied.
    """
    query, key, value = states
    group = len(query) // len(key)
    if group > 1:
        key, value = (tensor.repeat_interleave(group, dim=0) for tensor in (key, value))

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: LengthClass) -> Tensor:
        bounds, longest = sequences.bounds, sequences.longest
        output: Tensor = torch.ops.aten._efficient_attention_forward(  # noqa: SLF001
            query[None], key[None], value[None], None, bounds, bounds, longest, longest, 0.0,
            _CAUSAL if causal else _NO_MASK, False, scale=scale,
        )[0]  # fmt: skip
        return output[0]

    return attend_by_length(attend, (query, key, value), packed)


def has_window(attend: Attention) -> bool:
    """Whether an implementation of `Attention` supports a window itself."""
    return "window" in signature(attend).parameters


class PackedAttention:
    """Attention in each sequence of `packed` by `attend`, with a window for some layers."""

    def __init__(self, attend: Attention, packed: PackedBatch) -> None:
        self._attend: Callable[..., Tensor] = attend
        self.packed = packed
        # Read once for all layers of a forward.
        self._has_window = has_window(attend)
        self._short_sequences: dict[int, PackedBatch] = {}

    def __call__(
        self, states: QueryKeyValue, *, scale: float, causal: bool, window: int | None
    ) -> Tensor:
        """Return `[T, H, D]` for query `[H, T, D]`, key and value `[Hkv, T, D]`.

        A token attends to tokens less than `window` tokens away. If `attend` does not support a
        window, it computes the sequences that fit one, and PyTorch's operator the longer ones.
        Sequences with unattended tokens always fit.
        """
        packed, attend = self.packed, partial(self._attend, scale=scale, causal=causal)
        if window is not None and self._has_window:
            return attend(states, packed, window=window)
        if window is None or packed.max_length <= window:
            return attend(states, packed)
        short = self._select_short_sequences(window)
        borders = [0, *packed.offsets[len(short.unpack_order) :].tolist()]
        short_states, *long_sequences = (
            tuple(tensor[:, start:stop] for tensor in states) for start, stop in pairwise(borders)
        )
        attended = [attend(short_states, short)] if short.tokens else []
        windowed = partial(_attend_in_window, scale=scale, causal=causal, window=window)
        return torch.cat([*attended, *(windowed(*sequence) for sequence in long_sequences)])

    def _select_short_sequences(self, window: int) -> PackedBatch:
        """Return the sequences no longer than the window as a batch, which may be empty."""
        if window not in self._short_sequences:
            packed = self.packed
            count = int(np.argmax(np.diff(packed.offsets) > window))
            tokens = int(packed.offsets[count])
            self._short_sequences[window] = PackedBatch(
                packed.input_ids[:, :tokens],
                packed.position_ids[:, :tokens],
                packed.cu_seqlens[: count + 1],
                packed.offsets[: count + 1],
                np.arange(count),
                partly_attended=packed.partly_attended,
            )
        return self._short_sequences[window]


# The number of queries that `_attend_in_window` computes at a time.
_WINDOW_BLOCK = 256


def _attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, window: int
) -> Tensor:
    """Compute one sequence, longer than the window, in blocks of queries; return `[L, H, D]`.

    The query is `[H, L, D]`, key and value are `[Hkv, L, D]`.
    """
    length = query.shape[1]
    position = torch.arange(length, device=query.device)
    blocks = []
    for start in range(0, length, _WINDOW_BLOCK):
        stop = min(length, start + _WINDOW_BLOCK)
        last_key = stop if causal else min(length, stop + window - 1)
        queries, keys = slice(start, stop), slice(max(0, start - window + 1), last_key)
        distances = position[queries, None] - position[keys]
        visible = distances.abs() < window
        blocks.append(
            functional.scaled_dot_product_attention(
                query[None, :, queries],
                key[None, :, keys],
                value[None, :, keys],
                attn_mask=visible & (distances >= 0) if causal else visible,
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )[0]
        )
    return torch.cat(blocks, dim=1).transpose(0, 1)


def exclude_unattended(attend: Attention) -> Attention:
    """Wrap `attend` so that no token attends to tokens that are marked as unattended.

    Sequences with such tokens are computed again, padded and masked.
    """

    # `wraps` keeps the signature of `attend`, which `has_window` reads.
    @wraps(attend)
    def excluding(
        states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool, **window: Any
    ) -> Tensor:
        output = attend(states, packed, scale=scale, causal=causal, **window)
        padding = packed.partly_attended
        if padding is not None:
            masked = _attend_causally if causal else partial(attend_by_sdpa, causal=False)
            attended = output.new_empty(len(padding.tokens), *output.shape[1:])
            attend_padded(masked, states, padding, attended, scale=scale)
            output.index_copy_(0, padding.tokens, attended)
        return output

    return excluding


def _attend_causally(states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor) -> None:
    """Implement `BlockAttention` causally: PyTorch's operator takes a mask or `is_causal`."""
    length = output.shape[2]
    later = torch.full((length, length), -torch.inf, dtype=output.dtype, device=output.device)
    attend_by_sdpa(states, output, scale=scale, mask=mask + later.triu(1), causal=False)
