"""Products in 8 bits against those in float32, row by row."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from smart_embedder.models.device.choose import cpu_has_int8
from smart_embedder.models.families.int8 import QuantizedLinear
from smart_embedder.models.ops.choose import choose_backend

pytestmark = pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
# In bfloat16, which is what runs beside int8 where the processor has it.
BACKEND = choose_backend(torch.device("cpu"), torch.bfloat16)
SHAPES = [(64, 192), (40, 24), (35, 7), (1024, 256)]
FUNCTIONS = {
    None: lambda x: x,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def random_layer(width: int, out: int) -> nn.Linear:
    torch.manual_seed(width + out)
    layer = nn.Linear(width, out)
    # Channels of very different size, as real ones are.
    layer.weight.data *= torch.rand(out, 1) * 10
    return layer


def quantized(layers, states, activation=None, dtype=torch.float32) -> QuantizedLinear:
    return QuantizedLinear.of(layers, states, BACKEND, dtype, activation)


def worst_cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return functional.cosine_similarity(actual.float(), expected.float(), dim=1).min().item()


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), SHAPES)
@torch.inference_mode()
def test_states_are_multiplied_with_an_activation(width, out, dtype, activation) -> None:
    layer = random_layer(width, out)
    states = torch.randn(50, width)
    actual = quantized([layer], states, activation, dtype)(states.to(dtype))
    assert actual.dtype == dtype
    expected = FUNCTIONS[activation](layer(states))
    # Not row by row: where all channels of one are near 0, rounding is all there is to compare.
    assert (actual.float() - expected).norm() < 0.02 * expected.norm()


@torch.inference_mode()
def test_layers_that_read_the_same_states_stand_side_by_side() -> None:
    layers = [random_layer(64, 32), random_layer(64, 48)]
    states = torch.randn(9, 64)
    exact = torch.cat([layer(states) for layer in layers], dim=1)
    assert worst_cosine(quantized(layers, states)(states), exact) > 0.999


@pytest.mark.parametrize(("width", "out"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_of_any_range_are_multiplied(width, out, dtype) -> None:
    layer = random_layer(width, out)
    states = (torch.randn(50, width) + torch.randn(50, 1)) * torch.logspace(-3, 3, 50)[:, None]
    states = functional.gelu(states).to(dtype)
    actual = quantized([layer], torch.randn(20, width))(states)
    assert worst_cosine(actual, layer(states.float())) > 0.999


@pytest.mark.parametrize("fill", [0.0, -0.17, 5.0])
@torch.inference_mode()
def test_a_row_of_one_value_is_multiplied(fill: float) -> None:
    layer = random_layer(64, 32)
    states = torch.full((3, 64), fill)
    exact = layer(states)
    actual = quantized([layer], torch.randn(20, 64))(states)
    torch.testing.assert_close(actual, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    states = torch.randn(70, 64) * torch.logspace(-1, 2, 70)[:, None]
    linear = quantized([random_layer(64, 128)], states[:20], "gelu")
    together = linear(states)
    for row in range(70):
        assert torch.equal(linear(states[row : row + 1]), together[row : row + 1])


@torch.inference_mode()
def test_an_output_channel_without_weights_is_its_bias() -> None:
    layer = random_layer(32, 8)
    layer.weight.data[3] = 0
    states = torch.randn(4, 32)
    actual = quantized([layer], states)(states)
    torch.testing.assert_close(actual[:, 3], layer.bias[3].expand(4))


@torch.inference_mode()
def test_channels_that_calibration_never_saw_are_multiplied() -> None:
    layer = random_layer(64, 256)
    states = torch.randn(60, 64)
    seen = states.clone()
    seen[:, 20:] = 0
    assert worst_cosine(quantized([layer], seen)(states), layer(states)) > 0.99
    assert quantized([layer], torch.zeros(5, 64))(states).isfinite().all()


@pytest.mark.parametrize("channels", [1, 4, 12])
@torch.inference_mode()
def test_large_channels_do_not_blur_the_others(channels: int) -> None:
    layer = random_layer(64, 256)
    states = functional.gelu(torch.randn(60, 64))
    states[:, :channels] *= 100
    layer.weight.data[:, :channels] /= 100
    assert worst_cosine(quantized([layer], states)(states), layer(states)) > 0.999


@torch.inference_mode()
def test_a_few_rows_with_a_large_channel_are_as_exact_as_the_others() -> None:
    """As the first and the last token of every text are in trained models."""
    layer = random_layer(384, 256)
    states = torch.randn(60, 384)
    states[::20, 7] = 40
    assert worst_cosine(quantized([layer], states)(states), layer(states)) > 0.9998
