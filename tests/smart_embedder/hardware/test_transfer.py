"""Results on the host equal those on the device, and rows that are not finite are marked."""

import math

import numpy as np
import pytest
import torch

from smart_embedder.hardware import transfer
from smart_embedder.hardware.transfer import DeviceRows, HostRows, start_copies
from tests.support.simulated_cuda import simulated_cuda


@pytest.mark.parametrize(
    ("rows", "finite"),
    [
        (torch.rand(3, 4), [True] * 3),
        (torch.rand(5), [True] * 5),
        (torch.empty(0, 4), []),
        *(
            (torch.tensor([[1.0, 2.0], [value, 3.0], [0.0, 0.0]]), [True, False, True])
            for value in (math.nan, math.inf, -math.inf)
        ),
        (torch.tensor([[math.inf, -math.inf]]), [False]),  # Infinities do not cancel out.
    ],
)
def test_copies_keep_order_and_mark_rows_that_are_not_finite(rows, finite) -> None:
    other = torch.rand(2)
    plain, arrived = start_copies([DeviceRows.of(other), DeviceRows.of(rows)], tokens=7)()
    np.testing.assert_array_equal(plain.values, other.numpy())
    np.testing.assert_array_equal(arrived.values, rows.numpy())
    assert plain.finite.all()
    assert arrived.finite.tolist() == finite


def test_copies_from_a_gpu_reuse_pinned_buffers() -> None:
    """Two batches are in flight, and no copy overwrites another."""
    rows = [torch.empty(3, 5, dtype=torch.float16), torch.empty(7), torch.empty(2, 2, 9)]
    kept: list[HostRows] = []
    with simulated_cuda() as cuda:
        on_device = [DeviceRows.of(tensor.to("cuda:0")) for tensor in rows]
        for _ in range(3):
            blocks = cuda.pinned_blocks
            with cuda.forward():
                in_flight = [start_copies(on_device, tokens=10_000) for _ in range(2)]
            for collect in in_flight:
                kept += collect()
        # The first batches allocated the buffers, the others reused them.
        assert cuda.pinned_blocks == blocks
        assert cuda.copies == 2 * len(kept)
    for number, (copied, tensor) in enumerate(zip(kept, rows * 6, strict=True)):
        assert copied.values.shape == tensor.shape
        assert copied.values.dtype == np.float32
        assert (copied.values == 2 * number + 1).all()
        assert copied.finite.shape == tensor.shape[: max(1, tensor.dim() - 1)]


def test_take_buffer_reuses_large_enough_buffers(monkeypatch) -> None:
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **_: make(size, dtype=torch.uint8))
    with simulated_cuda():
        free, _ = transfer.buffers_and_stream(torch.device("cuda:0"))
    small = transfer.take_buffer(free, 10)
    assert len(small) == 2**20
    assert [len(transfer.take_buffer(free, size)) for size in (2**20, 2**20 + 1)] == [2**20, 2**21]
    free.append(small)
    assert transfer.take_buffer(free, 2**20) is small
    free.append(small)
    assert len(transfer.take_buffer(free, 2**22)) == 2**22  # The small buffer is replaced.
    assert not free
    buffers = [torch.empty(2**20) for _ in range(3)]
    free.extend(buffers)
    assert [*map(id, free)] == [*map(id, buffers[1:])]


@pytest.mark.parametrize(("tokens", "sleeps"), [(16, False), (1024, False), (1025, True)])
def test_copies_of_a_short_forward_poll_and_others_sleep(monkeypatch, tokens, sleeps) -> None:
    with simulated_cuda():
        make, events = torch.cuda.Event, []
        monkeypatch.setattr(
            torch.cuda, "Event", lambda **options: events.append(options) or make(**options)
        )
        start_copies([DeviceRows.of(torch.rand(3).to("cuda:0"))], tokens)()
    assert events == [{"blocking": sleeps}]
