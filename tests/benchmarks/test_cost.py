"""The count of operations, against PyTorch's own on the model itself."""

from pathlib import Path

import torch
from torch.nn import Linear
from torch.utils.flop_counter import FlopCounterMode
from transformers import XLMRobertaModel

from benchmarks.checkpoints import Shape, save_encoder
from benchmarks.cost import Encoder


def counted_by_pytorch(folder: Path, length: int, *, heads: bool) -> int:
    model = XLMRobertaModel.from_pretrained(
        folder, add_pooling_layer=False, attn_implementation="eager"
    )
    sparse, colbert = Linear(32, 1), Linear(32, 32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        states = model(torch.full((1, length), 5)).last_hidden_state
        if heads:
            sparse(states)
            colbert(states[:, 1:])
    return int(counter.get_total_flops())


def test_operations_are_those_that_pytorch_counts(tmp_path: Path) -> None:
    save_encoder(tmp_path, Shape(hidden=32, layers=3, heads=4, inner=96), vocabulary=20)
    encoder = Encoder.read(tmp_path)
    for heads in (True, False):
        for length in (1, 7, 100):
            counted = counted_by_pytorch(tmp_path, length, heads=heads)
            assert encoder.flop([length], heads=heads) == counted


def test_texts_add_up_and_padding_counts_nothing() -> None:
    encoder = Encoder(hidden=64, layers=2, inner=256)
    assert encoder.flop([3, 50]) == encoder.flop([3]) + encoder.flop([50])


def test_a_token_of_bge_m3_costs_604_million_operations_before_attention() -> None:
    encoder = Encoder(hidden=1024, layers=24, inner=4096)
    scores_and_values = 4 * 1024 * 24
    assert encoder.flop([1], heads=False) - scores_and_values == 603_979_776
