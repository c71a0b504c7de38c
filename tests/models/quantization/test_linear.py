"""Products in 8 bits against those in float32, row by row."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from app.models.device.choose import cpu_has_int8
from app.models.ops.arguments import LayerNorm
from app.models.ops.backend import choose_backend
from app.models.quantization.linear import (
    MAX_VALUE,
    SHIFT,
    DynamicLinear,
    StaticLinear,
    Steps,
    choose_factors,
)

pytestmark = pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
# In bfloat16, which is what runs beside int8 where the processor has it.
BACKEND = choose_backend(torch.device("cpu"), torch.bfloat16)
SHAPES = [(64, 192), (40, 24), (36, 7), (1024, 256)]


def random_layer(width: int, out: int) -> nn.Linear:
    torch.manual_seed(width + out)
    layer = nn.Linear(width, out)
    # Channels of very different size, as real ones are.
    layer.weight.data *= torch.rand(out, 1) * 10
    return layer


def plain_norm(width: int) -> LayerNorm:
    return LayerNorm(torch.ones(width), torch.zeros(width), 1e-12)


def even_steps(width: int, size: float) -> Steps:
    return Steps(torch.full((width,), size), torch.zeros(width))


def worst_cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return functional.cosine_similarity(actual.float(), expected.float(), dim=1).min().item()


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (None, lambda x: x),
        ("gelu", functional.gelu),
        ("gelu_new", lambda x: functional.gelu(x, approximate="tanh")),
        ("relu", functional.relu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), SHAPES)
@torch.inference_mode()
def test_a_norms_output_is_multiplied_with_its_activation(
    width, out, dtype, activation, function
) -> None:
    layer = random_layer(width, out)
    states = torch.randn(50, width)
    steps = Steps.choose(states, [layer])
    actual = StaticLinear([layer], steps, BACKEND, activation=activation, dtype=dtype)(
        steps.take(states)
    )
    assert actual.dtype == dtype
    expected = function(layer(states))
    # Not row by row: where all channels of one are near 0, rounding is all there is to compare.
    assert (actual.float() - expected).norm() < 0.02 * expected.norm()


@torch.inference_mode()
def test_layers_that_read_the_same_norm_stand_side_by_side() -> None:
    layers = [random_layer(64, 32), random_layer(64, 48)]
    states = torch.randn(9, 64)
    steps = Steps(torch.full((64,), 0.05), torch.randn(64))
    both = StaticLinear(layers, steps, BACKEND)(steps.take(states))
    each = [StaticLinear([layer], steps, BACKEND)(steps.take(states)) for layer in layers]
    torch.testing.assert_close(both, torch.cat(each, dim=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_new", "relu"])
@torch.inference_mode()
def test_a_row_with_an_outlier_is_as_exact_as_any(activation) -> None:
    layer = random_layer(64, 96)
    steps = even_steps(64, 3 / MAX_VALUE)
    states = torch.randn(40, 64).clamp(-3, 3)
    states[[3, 4, 39]] *= torch.tensor([2.0, 50.0, 1000.0])[:, None]
    actual = StaticLinear([layer], steps, BACKEND, activation=activation)(steps.take(states))
    exact = layer(states)
    wanted = {
        None: exact,
        "gelu": functional.gelu(exact),
        "gelu_new": functional.gelu(exact, approximate="tanh"),
        "relu": exact.relu(),
    }[activation]
    assert worst_cosine(actual, wanted) > 0.999


@pytest.mark.parametrize(("width", "out"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_of_any_range_are_multiplied_and_added(width, out, dtype) -> None:
    norm = plain_norm(out)
    layer = random_layer(width, out)
    states = (torch.randn(50, width) + torch.randn(50, 1)) * torch.logspace(-3, 3, 50)[:, None]
    states = functional.gelu(states).to(dtype)
    steps = Steps(torch.rand(out), torch.randn(out))
    residual = torch.randn(50, out) * layer(states.float()).std(1, keepdim=True)
    exact = norm(layer(states.float()) + residual)
    join = DynamicLinear(layer, torch.rand(width) + 0.5, steps, norm, BACKEND)
    actual = join(states, steps.take(residual))
    assert worst_cosine(actual[5:], exact[5:]) > 0.999


@pytest.mark.parametrize("fill", [0.0, -0.17, 5.0])
@torch.inference_mode()
def test_a_row_of_one_value_is_multiplied(fill: float) -> None:
    layer = random_layer(64, 32)
    states = torch.full((3, 64), fill)
    norm = plain_norm(32)
    join = DynamicLinear(layer, torch.ones(64), even_steps(32, 1.0), norm, BACKEND)
    actual = join(states, torch.full((3, 32), SHIFT))
    torch.testing.assert_close(actual, norm(layer(states)), rtol=0.02, atol=0.1)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    layer = random_layer(64, 128)
    states = torch.randn(70, 64) * torch.logspace(-1, 2, 70)[:, None]
    from_norm = StaticLinear([layer], even_steps(64, 0.1), BACKEND, activation="gelu")
    to_norm = DynamicLinear(
        layer, torch.rand(64) + 0.5, even_steps(128, 1.0), plain_norm(128), BACKEND
    )
    together = from_norm(states / 0.1 + SHIFT), to_norm(states, torch.full((70, 128), SHIFT))
    for row in range(70):
        alone = states[row : row + 1]
        torch.testing.assert_close(from_norm(alone / 0.1 + SHIFT), together[0][row : row + 1])
        torch.testing.assert_close(
            to_norm(alone, torch.full((1, 128), SHIFT)), together[1][row : row + 1]
        )


@torch.inference_mode()
def test_an_output_channel_without_weights_is_its_bias() -> None:
    layer = random_layer(32, 8)
    layer.weight.data[3] = 0
    steps = even_steps(32, 0.05)
    actual = StaticLinear([layer], steps, BACKEND)(steps.take(torch.randn(4, 32)))
    torch.testing.assert_close(actual[:, 3], layer.bias[3].expand(4))


@torch.inference_mode()
def test_a_channel_of_a_wide_range_does_not_blur_the_others() -> None:
    layer = random_layer(64, 256)
    states = torch.randn(60, 64)
    states[:, 5] *= 300
    layer.weight.data[:, 5] /= 300
    steps = Steps.choose(states, [layer])
    assert (steps.take(states) - SHIFT).abs().max() < MAX_VALUE
    actual = StaticLinear([layer], steps, BACKEND)(steps.take(states))
    assert worst_cosine(actual, layer(states)) > 0.999


@torch.inference_mode()
def test_channels_far_from_zero_have_steps_as_fine_as_others() -> None:
    layer = random_layer(64, 256)
    states = torch.randn(60, 64)
    far = states + 100 * torch.randn(64)
    wanted = layer(far) - layer(far).mean(0)
    steps = Steps.choose(far, [layer])
    actual = StaticLinear([layer], steps, BACKEND)(steps.take(far)) - layer(far).mean(0)
    assert worst_cosine(actual, wanted) > 0.999


@torch.inference_mode()
def test_large_channels_of_a_row_do_not_blur_the_others() -> None:
    layer, norm, steps = random_layer(64, 256), plain_norm(256), even_steps(256, 1.0)
    states = functional.gelu(torch.randn(60, 64))
    states[:, :4] *= 100
    layer.weight.data[:, :4] /= 100
    join = DynamicLinear(layer, choose_factors(states, layer), steps, norm, BACKEND)
    actual = join(states, steps.take(torch.zeros(60, 256)))
    assert worst_cosine(actual, norm(layer(states))) > 0.999
