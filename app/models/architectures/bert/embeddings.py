"""What the first layer of an encoder reads."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from app.models.architectures.token_table import TokenTable
from app.models.batch.packing import PackedBatch
from app.models.ops.norm import Norm


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The sum of what a token, its position and its type mean, normalised.

    `positions` is `[positions, width]` and `type` `[width]`, that of type 0, which every token is
    of.
    """

    tokens: TokenTable
    positions: Tensor
    type: Tensor
    norm: Norm

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, width]`: the states that the first layer reads."""
        states = self.tokens(packed.input_ids[0]).to(self.positions.dtype)
        # The order of the sum is that of transformers.
        states = states.add_(self.type)
        return self.norm(states.add_(functional.embedding(packed.position_ids[0], self.positions)))
