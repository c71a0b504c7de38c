"""The start-up proof: paths that compute what they should are used, all others refused."""

import math

import pytest
import torch
from structlog.testing import capture_logs

from app.errors import StartupError
from app.models.attention.sdpa import sdpa
from app.models.ops.backend import choose_backend
from app.models.ops.proof import Trial
from app.models.ops.proof_cases import (
    CASES,
    DECODER,
    GPU_ENCODER,
    QUANTIZED_ENCODER,
    Shapes,
)
from app.models.ops.torch_backend import TorchBackend

CPU = torch.device("cpu")
M3 = Shapes(1024, 4096, 16, 16, 64, "gelu")
QWEN = Shapes(1024, 3072, 16, 8, 128, bias=False, causal=True)
ODD = Shapes(33, 70, 3, 3, 11, "relu")
EXACT = (torch.float32, torch.bfloat16)


def trial(backend: TorchBackend, shapes: Shapes = M3, dtype: torch.dtype = torch.float32) -> Trial:
    return Trial(backend, shapes, CPU, dtype)


class Planted(TorchBackend):
    """Its gate is faulty in one of several ways, and its attention where a test wants that."""

    name = "planted"
    fault = "wrong"

    def gate(self, states):
        result = super().gate(states)
        match self.fault:
            case "wrong":
                result[-1, -1] += 1
            case "nan":
                result[0, 0] = math.nan
            case "shape":
                return result[1:]
            case "raise":
                raise NotImplementedError("no kernel for this device\nof this kind")
        return result

    def load_attention(self, name):
        return self._wrong if name == "planted" else super().load_attention(name)

    def _wrong(self, *args, **kwargs):
        return sdpa(*args, **kwargs) * 1.1


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shapes", [M3, QWEN, ODD])
def test_every_path_of_this_machine_holds(shapes: Shapes, dtype: torch.dtype) -> None:
    operations = DECODER if shapes.causal else GPU_ENCODER
    backend = choose_backend(CPU, dtype)
    proofs = trial(backend, shapes, dtype).every_proof(operations)
    assert [proof for proof in proofs if not proof.holds] == []
    assert {proof.operation for proof in proofs} == set(operations)
    proven = trial(backend, shapes, dtype).prove(operations)
    assert proven.refused == ()
    assert proven.paths["attention"] == backend.attention


def test_every_operation_of_a_layer_has_a_case() -> None:
    assert set(GPU_ENCODER + QUANTIZED_ENCODER + DECODER) == set(CASES)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong", "differs by"),
        ("nan", "differs by inf"),
        ("shape", "differs by inf"),
        ("raise", "raises NotImplementedError"),
    ],
)
def test_a_faulty_path_is_refused_with_one_warning_and_the_next_one_used(fault, reason) -> None:
    backend = Planted()
    backend.fault = fault
    with capture_logs() as logs:
        proven = trial(backend, QWEN).prove(DECODER)
    assert proven.paths["gate"] == "torch"
    (refused,) = proven.refused
    assert (refused.operation, refused.path) == ("gate", "planted")
    assert reason in refused.reason
    (line,) = logs
    assert line["event"] == "path_refused"
    assert (line["path"], line["used_instead"]) == ("planted", "torch")
    if fault == "raise":
        assert line["reason"].endswith("no kernel for this device")
    states = torch.randn(5, 64)
    assert torch.equal(proven.backend.gate(states), TorchBackend().gate(states))


def test_what_was_refused_leaves_the_backend_of_other_models_as_it_was() -> None:
    backend = Planted("planted")
    proven = trial(backend, QWEN).prove(DECODER)
    assert backend.attention == "planted"
    assert proven.backend.attention == proven.paths["attention"] == "sdpa"
    assert {proof.operation for proof in proven.refused} == {"gate", "attention"}


def test_an_attention_that_a_setting_names_stops_the_start() -> None:
    backend = Planted("planted")
    with pytest.raises(StartupError, match="ATTENTION=planted does not compute"):
        trial(backend, QWEN).prove(DECODER, attention_named=True)
    # Another operation of the same backend may still be replaced.
    backend = Planted("sdpa")
    assert trial(backend, QWEN).prove(DECODER, attention_named=True).paths["gate"] == "torch"


def test_a_device_on_which_nothing_is_right_stops_the_start(monkeypatch) -> None:
    right = TorchBackend.gate

    def wrong_in_bfloat16(self, states):
        return right(self, states) * (1 if states.dtype is torch.float32 else 2)

    monkeypatch.setattr(TorchBackend, "gate", wrong_in_bfloat16)
    with pytest.raises(StartupError, match="does not compute gate correctly"):
        trial(TorchBackend(), QWEN, torch.bfloat16).prove(DECODER)
