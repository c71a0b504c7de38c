"""Results on the host: as they were on the device, and only if they are numbers."""

import numpy as np
import pytest
import torch

from app.errors import InferenceError
from app.models.transfer import start_copies


def test_arrays_come_back_in_their_places() -> None:
    first, second = torch.rand(3, 4), torch.rand(5)
    arrays = start_copies([first, second])()
    np.testing.assert_array_equal(arrays[0], first.numpy())
    np.testing.assert_array_equal(arrays[1], second.numpy())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_an_error(value: float) -> None:
    damaged = torch.rand(3, 4)
    damaged[1, 2] = value
    with pytest.raises(InferenceError, match="not finite"):
        start_copies([torch.rand(2), damaged])()


def test_infinities_of_both_signs_do_not_cancel_out() -> None:
    with pytest.raises(InferenceError):
        start_copies([torch.tensor([float("inf"), -float("inf")])])()


def test_an_empty_array_is_fine() -> None:
    (array,) = start_copies([torch.empty(0, 4)])()
    assert array.shape == (0, 4)
