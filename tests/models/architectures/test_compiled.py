"""TORCH_COMPILE: the same vectors, few compilations, and a sentence where no compiler is."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError

from app.errors import StartupError
from app.models.architectures.bert import (
    Encoder,
    EncoderConfig,
    EncoderParameters,
    make_encoder,
)
from app.models.architectures.compiled import compile_layers, compiler_errors_as_startup_errors
from app.models.architectures.qwen3 import (
    Decoder,
    DecoderConfig,
    DecoderParameters,
    make_decoder,
)
from app.models.backbone import Target
from app.models.batch.packing import pack
from app.models.checkpoint.weights import Weights
from app.models.ops.backend import choose_backend
from app.models.tasks.m3 import load_m3_embedder

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
CPU = torch.device("cpu")


@pytest.fixture
def compilations() -> Counter[str]:
    """What the compiler counts, from nothing on."""
    torch._dynamo.reset()
    counters["stats"].clear()
    return counters["stats"]


def encoder(folder: Path) -> tuple[Encoder, int | None]:
    """And the id from behind which it counts positions."""
    config = EncoderConfig.read(folder)
    parameters = EncoderParameters(Weights.read(folder), config, CPU, torch.float32)
    return make_encoder(parameters, choose_backend(CPU, torch.float32)), config.padding


def decoder(folder: Path) -> tuple[Decoder, None]:
    config = DecoderConfig.read(folder)
    parameters = DecoderParameters(Weights.read(folder), config, CPU, torch.float32)
    return make_decoder(parameters, choose_backend(CPU, torch.float32)), None


@needs_compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("make", "checkpoint"), [(encoder, "tiny_m3"), (decoder, "tiny_qwen")])
@torch.inference_mode()
def test_what_is_compiled_gives_the_same_states(
    make, checkpoint: str, request: pytest.FixtureRequest, compilations: Counter[str]
) -> None:
    """As it runs on a GPU; here in PyTorch's own products, which it has there."""
    plain, padding = make(request.getfixturevalue(checkpoint))
    compiled = compile_layers(plain)
    rng = np.random.default_rng(0)
    beginning = rng.integers(5, 100, 20)
    # Few enough for one block of one thread: on a GPU there are no blocks.
    for lengths in ((5, 9), (40, 3, 7), (100,), (150, 31)):
        sequences = [np.append(beginning, rng.integers(5, 100, length)) for length in lengths]
        for causal in {False, make is decoder}:
            packed = pack(sequences, device=CPU, roberta_padding=padding, causal=causal)
            torch.testing.assert_close(compiled(packed), plain(packed), rtol=0, atol=1e-5)
        if lengths == (40, 3, 7):
            count = compilations["unique_graphs"]
    assert 0 < count == compilations["unique_graphs"]


def test_a_model_on_a_cpu_says_that_it_is_not_compiled(
    tiny_m3: Path, float32_target: Target
) -> None:
    with structlog.testing.capture_logs() as lines:
        load_m3_embedder("tiny", tiny_m3, 64, replace(float32_target, compiled=True))
    assert [line["event"] for line in lines] == ["torch_compile_ignored"]


def test_a_compiler_that_is_missing_is_told_in_one_sentence() -> None:
    sentence = "cannot compile the model: .*no g\\+\\+; TORCH_COMPILE"
    with pytest.raises(StartupError, match=sentence), compiler_errors_as_startup_errors():
        raise InductorError(RuntimeError("no g++"), None)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), compiler_errors_as_startup_errors():
        _ = 1 / 0
