"""Which device and which number format are taken, and what is said where one cannot be.

Only PyTorch's own answers are replaced: no machine that runs these tests has so old a driver.
"""

import platform
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.models.device import choose as device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def with_capabilities(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True))


@pytest.mark.parametrize(
    ("capability", "expected"), [("amx_bf16", torch.bfloat16), ("avx2", torch.float32)]
)
def test_auto_is_bfloat16_where_the_processor_has_it(monkeypatch, capability, expected) -> None:
    with_capabilities(monkeypatch, capability)
    assert device.choose_dtype("auto", CPU) == expected


@pytest.mark.parametrize(
    ("system", "expected"), [("Linux", torch.bfloat16), ("Darwin", torch.float32)]
)
def test_on_arm_bfloat16_and_int8_are_for_linux(monkeypatch, system, expected) -> None:
    with_capabilities(monkeypatch, "bf16", "dot", "i8mm")
    monkeypatch.setattr(platform, "system", lambda: system)
    assert device.choose_dtype("auto", CPU) == expected
    if system == "Linux":
        assert device.choose_dtype("int8", CPU) == torch.bfloat16
    else:
        with pytest.raises(StartupError, match="on Linux one of ARM's with dot products"):
            device.choose_dtype("int8", CPU)


@pytest.mark.parametrize(
    ("capabilities", "rest"),
    [(("avx2", "amx_int8", "amx_bf16"), torch.bfloat16), (("avx2",), torch.float32)],
)
def test_beside_int8_the_rest_runs_in_what_is_native(monkeypatch, capabilities, rest) -> None:
    with_capabilities(monkeypatch, *capabilities)
    assert device.choose_dtype("int8", CPU) == rest


def test_int8_on_a_gpu_stops_the_start() -> None:
    with pytest.raises(StartupError, match="DTYPE=int8 is for CPUs, and the models run on cuda"):
        device.choose_dtype("int8", CUDA)


def test_int8_on_a_processor_without_avx2_stops_the_start(monkeypatch) -> None:
    with_capabilities(monkeypatch, "avx", "sse4_2")
    with pytest.raises(StartupError, match="DTYPE=int8 needs an x86 processor with AVX2"):
        device.choose_dtype("int8", CPU)


TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version. Alternatively, go to: pytorch.org"
)


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


def test_a_driver_too_old_stops_the_start_where_a_gpu_is_asked_for(old_driver) -> None:
    with pytest.raises(StartupError) as caught:
        device.choose_device("cuda:0")
    assert str(caught.value) == (
        f"DEVICE=cuda:0 needs an NVIDIA GPU that PyTorch {torch.__version__} can use, and it sees "
        "none (The NVIDIA driver on your system is too old (found version 11040)); check "
        "nvidia-smi and the driver, or set DEVICE=cpu"
    )


def test_auto_says_why_it_passes_over_the_gpu(old_driver) -> None:
    if torch.backends.mps.is_available():
        pytest.skip("this machine has Apple's GPU")
    with capture_logs() as logs:
        assert device.choose_device("auto") == torch.device("cpu")
    reason = "The NVIDIA driver on your system is too old (found version 11040)"
    assert logs == [
        {"event": "no_gpu_used", "log_level": "warning", "reason": reason, "device": "cpu"}
    ]


def test_auto_says_nothing_where_the_build_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with capture_logs() as logs:
        device.choose_device("auto")
    assert logs == []


@pytest.mark.parametrize(
    ("capability", "qwen"),
    [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float32)],
)
def test_on_a_gpu_each_model_has_the_format_that_suits_it(monkeypatch, capability, qwen) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert device.choose_dtype("auto", CUDA) is torch.float16
    assert device.choose_dtype("auto", CUDA, qwen=True) is qwen
    assert device.choose_dtype("float16", CUDA, qwen=True) is torch.float16


@pytest.fixture
def seen_gpu(monkeypatch):
    """A GPU of a given compute capability, and what PyTorch was built for."""

    def see(capability: tuple[int, int], built: list[str]) -> None:
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda *_: capability,
            "get_device_name": lambda *_: "Some GPU",
            "get_arch_list": lambda: built,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    return see


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 1)])
def test_a_gpu_that_the_build_has_kernels_for_is_taken(seen_gpu, capability) -> None:
    seen_gpu(capability, CUDA_13)
    assert device.choose_device("cuda:0") == torch.device("cuda:0")
    assert device.choose_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("capability", [(7, 0), (6, 1)])
def test_a_gpu_that_the_build_has_no_kernels_for_is_named(seen_gpu, capability) -> None:
    seen_gpu(capability, CUDA_13)
    major, minor = capability
    sentence = f"no kernels for Some GPU, of compute capability {major}.{minor}; .* begin with 7.5"
    with pytest.raises(StartupError, match=f"DEVICE=cuda:0: PyTorch .* has {sentence}; set DEV"):
        device.choose_device("cuda:0")
    with capture_logs() as lines:
        assert device.choose_device("auto") == torch.device("cpu")
    (line,) = lines
    assert line["event"] == "no_gpu_used"
    assert line["reason"].startswith("PyTorch")


def test_a_build_that_names_other_architectures_is_taken_at_its_word(seen_gpu) -> None:
    seen_gpu((9, 4), ["gfx942"])
    assert device.choose_device("cuda:0") == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("cpu", "cpu"), ("cpu:1", "cpu"), ("cuda", "cuda"), ("cuda:0", "cuda:0"), ("mps", "mps")],
)
def test_a_device_that_is_named_is_taken(seen_gpu, monkeypatch, name, chosen) -> None:
    seen_gpu((9, 0), CUDA_13)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.choose_device(name) == torch.device(chosen)


def test_a_device_that_is_not_there_is_named(seen_gpu, monkeypatch) -> None:
    seen_gpu((9, 0), CUDA_13)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(StartupError, match="DEVICE=cuda:1: there are only 1 GPUs"):
        device.choose_device("cuda:1")
    with pytest.raises(StartupError, match="DEVICE=mps needs an Apple GPU, and there is none here"):
        device.choose_device("mps")


def test_half_precision_is_for_gpus() -> None:
    assert device.choose_dtype("float16", CUDA) is torch.float16
    assert device.choose_dtype("float32", CPU) is torch.float32
    with pytest.raises(StartupError, match="DTYPE=float16 is for GPUs; on a CPU use bfloat16"):
        device.choose_dtype("float16", CPU)


@pytest.mark.parametrize(
    ("capabilities", "processor"),
    [
        ({"cpu_name": "EPYC", "architecture": "x86_64"}, "EPYC"),
        ({"architecture": "aarch64"}, "aarch64"),
        ({}, "CPU"),
    ],
)
def test_the_hardware_is_described_by_its_name(seen_gpu, monkeypatch, capabilities, processor):
    seen_gpu((9, 0), CUDA_13)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(device, "available_threads", lambda: 7)
    assert device.describe_device(CPU) == f"{processor}, 7 threads"
    assert device.describe_device(CUDA) == "Some GPU"


def test_the_memory_of_a_gpu_is_read_by_kind_and_given_back(monkeypatch) -> None:
    done: list[str] = []
    for name, value in {
        "memory_allocated": lambda _: 1,
        "memory_reserved": lambda _: 2,
        "mem_get_info": lambda _: (3, 4),
        "get_device_properties": lambda _: SimpleNamespace(total_memory=5.0),
        "empty_cache": lambda: done.append("emptied"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device.gc, "collect", lambda: done.append("collected"))
    read = device.memory_reader(CUDA)
    kinds = ("allocated", "reserved", "free", "total")
    assert [read(kind) for kind in kinds] == [1, 2, 3, 4]
    assert device.memory_bytes(CUDA) == 5
    assert (device.memory_reader(CPU), device.memory_bytes(CPU)) == (None, None)
    device.memory_freer(CPU)()
    device.memory_freer(CUDA)()
    assert done == ["collected", "collected", "emptied"]
