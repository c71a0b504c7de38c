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
from app.jobs import Outputs
from app.models.attention import load_kernel
from app.models.backbone import Target
from app.models.compiled import compile_encoder, explained
from app.models.embedder import load_m3_embedder
from app.models.encoder import make_encoder
from app.models.encoder_config import EncoderConfig
from app.models.encoder_parameters import EncoderParameters
from app.models.packing import pack
from app.models.qwen import load_qwen_embedder
from app.models.weights import Weights
from tests.texts import varied_texts

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
CPU = torch.device("cpu")
DENSE = Outputs(dense=True)


@pytest.fixture
def compiled_target(float32_target: Target) -> Target:
    return replace(float32_target, compiled=True)


@pytest.fixture
def compilations() -> Counter[str]:
    """What the compiler counts, from nothing on."""
    torch._dynamo.reset()
    counters["stats"].clear()
    return counters["stats"]


@needs_compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model_gives_the_same_vectors(
    tiny_qwen: Path, float32_target: Target, compiled_target: Target, compilations: Counter[str]
) -> None:
    plain = load_qwen_embedder("tiny", tiny_qwen, 330, float32_target)
    compiled = load_qwen_embedder("tiny", tiny_qwen, 330, compiled_target)
    ids = [text.ids for text in plain.tokenize(varied_texts(60))]
    for batch in (ids[:1], ids[:7], ids):
        ours = compiled.forward(batch, DENSE)
        theirs = plain.forward(batch, DENSE)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.dense, other.dense, rtol=0, atol=1e-5)
    count = compilations["unique_graphs"]
    assert count > 0
    for start in range(0, 60, 11):
        compiled.forward(ids[start : start + 11], DENSE)
    assert compilations["unique_graphs"] == count


@needs_compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@torch.inference_mode()
def test_a_compiled_encoder_gives_the_same_states(
    tiny_m3: Path, compilations: Counter[str]
) -> None:
    """As it runs on a GPU; here in PyTorch's own products, which it has there."""
    config = EncoderConfig.read(tiny_m3)
    parameters = EncoderParameters(Weights.read(tiny_m3), config, CPU, torch.float32)
    plain = make_encoder(parameters, load_kernel("sdpa"))
    compiled = compile_encoder(plain)
    rng = np.random.default_rng(0)
    for lengths in ((5, 9), (40, 3, 7), (100,), (200, 31)):
        sequences = [rng.integers(5, 100, length) for length in lengths]
        packed = pack(sequences, device=CPU, roberta_padding=config.padding)
        torch.testing.assert_close(compiled(packed), plain(packed), rtol=0, atol=1e-5)
        if lengths == (40, 3, 7):
            count = compilations["unique_graphs"]
    assert 0 < count == compilations["unique_graphs"]


def test_bge_m3_on_a_cpu_says_that_it_is_not_compiled(
    tiny_m3: Path, compiled_target: Target
) -> None:
    with structlog.testing.capture_logs() as lines:
        load_m3_embedder("tiny", tiny_m3, 64, compiled_target)
    assert [line["event"] for line in lines] == ["torch_compile_ignored"]


def test_a_compiler_that_is_missing_is_told_in_one_sentence() -> None:
    sentence = "cannot compile the model: .*no g\\+\\+; TORCH_COMPILE"
    with pytest.raises(StartupError, match=sentence), explained():
        raise InductorError(RuntimeError("no g++"), None)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), explained():
        _ = 1 / 0
