"""Every layout of a linear layer against PyTorch's own product."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from app.models.ops import linear


def random_layer(width: int, out: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(width * out)
    return nn.Linear(width, out).to(dtype)


@pytest.mark.skipif(not linear.can_pack_bfloat16(), reason="needs a processor with bfloat16")
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 32, 100])
@pytest.mark.parametrize(("width", "out"), [(64, 192), (40, 24), (33, 7)])
def test_the_packed_layout_gives_the_product_and_its_activation(
    width, out, rows, activation
) -> None:
    layer = random_layer(width, out, torch.bfloat16)
    states = torch.randn(rows, width, dtype=torch.bfloat16)
    with torch.inference_mode():
        actual = linear.packed(layer.weight, layer.bias, activation)(states)
        exact = linear.reference(layer.weight.float(), layer.bias.float(), activation)
        expected = exact(states.float())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-7, atol=2**-7)


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
def test_layers_that_read_the_same_input_stand_side_by_side(activation, function, dtype) -> None:
    layers = [random_layer(32, out, dtype) for out in (32, 16, 48)]
    states = torch.randn(5, 32, dtype=dtype)
    with torch.inference_mode():
        actual = linear.make_linear(layers, activation)(states)
        expected = torch.cat([function(layer(states)) for layer in layers], dim=1)
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_single_layer_in_float32_keeps_its_weights_where_they_are() -> None:
    layer = random_layer(32, 32, torch.float32)
    compute = linear.make_linear([layer])
    with torch.inference_mode():
        layer.weight.zero_()
        layer.bias.fill_(3)
        assert (compute(torch.randn(2, 32)) == 3).all()
