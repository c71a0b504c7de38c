"""How many threads a forward on the CPU should use."""

import math
from functools import cache

import torch

# Below this much work for each thread, waiting for one another costs more than it saves, the more
# so because the threads share their cores with the event loop, the tokenizer and the clients.
_FLOP_WORTH_A_THREAD = 0.5e9


@cache
def available_threads() -> int:
    """What PyTorch would use by itself; asked once, because `set_for` changes its answer."""
    return torch.get_num_threads()


class CpuThreads:
    """Sets the calling thread's intra-operation threads to what a batch is worth."""

    def __init__(self, parameters: int) -> None:
        self._flop_per_token = 2 * parameters
        self._most = available_threads()

    def choose(self, tokens: int) -> int:
        """At least 1, at most what PyTorch would use by itself."""
        worth = math.ceil(tokens * self._flop_per_token / _FLOP_WORTH_A_THREAD)
        return max(1, min(self._most, worth))

    def set_for(self, tokens: int) -> None:
        """Apply `choose` to the thread that calls this."""
        threads = self.choose(tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
