"""Results on the host: as they were on the device, and which of them are numbers."""

import numpy as np
import pytest
import torch

from app.models.device.transfer import DeviceRows, start_copies


def test_arrays_come_back_in_their_places() -> None:
    first, second = torch.rand(3, 4), torch.rand(5)
    arrived = start_copies([DeviceRows.of(first), DeviceRows.of(second)])()
    np.testing.assert_array_equal(arrived[0].values, first.numpy())
    np.testing.assert_array_equal(arrived[1].values, second.numpy())
    assert all(each.finite.all() for each in arrived)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_the_row_with_a_number_that_is_not_finite_is_marked(value: float) -> None:
    damaged = torch.rand(3, 4)
    damaged[1, 2] = value
    plain, arrived = start_copies([DeviceRows.of(torch.rand(2)), DeviceRows.of(damaged)])()
    assert plain.finite.all()
    assert arrived.finite.tolist() == [True, False, True]


def test_infinities_of_both_signs_do_not_cancel_out() -> None:
    (arrived,) = start_copies([DeviceRows.of(torch.tensor([[float("inf"), -float("inf")]]))])()
    assert arrived.finite.tolist() == [False]


def test_an_empty_array_is_fine() -> None:
    (arrived,) = start_copies([DeviceRows.of(torch.empty(0, 4))])()
    assert arrived.values.shape == (0, 4)
    assert arrived.finite.shape == (0,)
