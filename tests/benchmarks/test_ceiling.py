"""The count of operations, against PyTorch's own on the model itself; the machine's ceiling."""

from pathlib import Path

import torch
from torch.nn import Linear
from torch.utils.flop_counter import FlopCounterMode
from transformers import XLMRobertaModel

from benchmarks.ceiling import PRODUCTS, Encoder, measure_ceilings
from benchmarks.checkpoints import Shape, save_encoder


def test_operations_are_those_that_pytorch_counts(tmp_path: Path) -> None:
    save_encoder(tmp_path, Shape(hidden=32, layers=3, heads=4, inner=96), vocabulary=20)
    encoder = Encoder.read(tmp_path)
    model = XLMRobertaModel.from_pretrained(
        tmp_path, add_pooling_layer=False, attn_implementation="eager"
    )
    sparse, colbert = Linear(32, 1), Linear(32, 32)
    for heads in (True, False):
        total = 0
        for length in (1, 7, 100):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                states = model(torch.full((1, length), 5)).last_hidden_state
                if heads:
                    sparse(states)
                    colbert(states[:, 1:])
            total += counter.get_total_flops()
            assert encoder.flop([length], heads=heads) == counter.get_total_flops()
        assert encoder.flop([1, 7, 100], heads=heads) == total, "padding counts nothing"


def test_every_precision_that_pytorch_multiplies_in_has_a_rate() -> None:
    # Where a processor has no instructions for 8 bits, the full shapes take PyTorch many minutes.
    ceilings = measure_ceilings(seconds=0, shapes=[(32, 64, 96)])
    assert ceilings.keys() <= PRODUCTS.keys()
    assert {"float32", "bfloat16"} <= ceilings.keys()
    assert min(ceilings.values()) > 0
