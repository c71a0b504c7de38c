"""The token budget of one forward, where MAX_BATCH_TOKENS is auto.

On a CPU about a thousand tokens already reach the full speed of the matrix units, and a small
budget keeps latency low. On a GPU the memory decides: a probe measures how much a token needs.
"""

import numpy as np
import torch

from app.jobs import Model, Outputs

CPU_TOKENS = 1024
_GPU_MOST_TOKENS = 131_072
_PROBE_TOKENS = 4096
_MEMORY_SHARE = 0.8
_ANY_TOKEN = 5


def choose_token_budget(model: Model, device: torch.device) -> int:
    """Warm `model` up and return how many tokens one forward should hold on `device`."""
    if device.type != "cuda":
        _forward(model, CPU_TOKENS)
        return CPU_TOKENS
    bytes_per_token = _measure_bytes_per_token(model, device)
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(_GPU_MOST_TOKENS, int(free * _MEMORY_SHARE / bytes_per_token)))


def _measure_bytes_per_token(model: Model, device: torch.device) -> float:
    _forward(model, _PROBE_TOKENS)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _forward(model, _PROBE_TOKENS)
    return max(1.0, (torch.cuda.max_memory_allocated(device) - before) / _PROBE_TOKENS)


def _forward(model: Model, tokens: int) -> None:
    """Run about `tokens` tokens with every output, in sequences of at most 256."""
    length = min(256, model.max_length)
    sequences = [np.full(length, _ANY_TOKEN)] * max(1, tokens // length)
    model.forward(sequences, Outputs(dense=True, sparse=True, colbert=True))
