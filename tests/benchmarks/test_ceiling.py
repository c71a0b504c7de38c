"""The machine's matrix ceiling, on products too short to tell anything about it."""

from benchmarks.ceiling import PRODUCTS, measure_ceilings


def test_every_precision_that_pytorch_multiplies_in_has_a_rate() -> None:
    # Where a processor has no instructions for 8 bits, the full shapes take PyTorch many minutes.
    ceilings = measure_ceilings(seconds=0, shapes=[(32, 64, 96)])
    assert ceilings.keys() <= PRODUCTS.keys()
    assert {"float32", "bfloat16"} <= ceilings.keys()
    assert min(ceilings.values()) > 0
