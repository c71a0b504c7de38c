"""The choice of device and dtype, the messages for those that cannot be used, and memory.

PyTorch's functions are replaced, since no machine that runs these tests has so old a driver.
"""

import platform
import queue
import re
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.hardware import cpu, device
from smart_embedder.interface import MemoryUsage
from tests.support.script import run_script

CPU, CUDA, MPS = map(torch.device, ("cpu", "cuda", "mps"))


@pytest.mark.parametrize(
    ("capabilities", "system", "auto", "int8"),
    [
        (("avx2", "amx_int8", "amx_bf16"), "Linux", torch.bfloat16, None),
        (("avx2", "avx512_bf16"), "Darwin", torch.bfloat16, None),
        (("avx2",), "Linux", torch.float32, None),
        (("avx", "sse4_2"), "Linux", torch.float32, "DTYPE=int8 needs an x86 processor with AVX2"),
        (("bf16", "dot", "i8mm"), "Linux", torch.bfloat16, None),
        (
            ("bf16", "dot", "i8mm"),
            "Darwin",
            torch.float32,
            "an ARM processor with dot products on Linux",
        ),
    ],
)
def test_cpu_dtype_is_the_native_one_alone_and_beside_int8(
    monkeypatch, capabilities, system, auto, int8
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))
    monkeypatch.setattr(platform, "system", lambda: system)
    assert device.choose_dtype("auto", CPU) == auto
    if int8 is None:
        assert device.choose_dtype("int8", CPU) == auto
    else:
        with pytest.raises(StartupError, match=int8):
            device.choose_dtype("int8", CPU)


FLOAT8 = "DTYPE=float8 needs .*, and the models run on"


@pytest.mark.parametrize(
    ("name", "qwen", "where", "capability", "expected"),
    [
        ("auto", False, CUDA, (9, 0), torch.float16),
        ("auto", False, CUDA, (7, 5), torch.float16),
        ("auto", True, CUDA, (8, 0), torch.bfloat16),
        ("auto", True, CUDA, (7, 5), torch.float32),
        ("auto", True, MPS, None, torch.float32),
        ("float16", True, CUDA, (9, 0), torch.float16),
        ("float32", False, CPU, None, torch.float32),
        ("float16", False, CPU, None, "DTYPE=float16 is for GPUs; on a CPU use bfloat16"),
        ("int8", False, CUDA, None, "DTYPE=int8 is for CPUs, and the models run on cuda"),
        # With float8 everything except matrix products is in bfloat16.
        ("float8", False, CUDA, (8, 9), torch.bfloat16),
        ("float8", False, CUDA, (9, 0), torch.bfloat16),
        ("float8", False, CUDA, (8, 6), f"{FLOAT8} cuda"),
        ("float8", False, MPS, None, f"{FLOAT8} mps"),
        ("float8", False, CPU, None, f"{FLOAT8} cpu"),
    ],
)
def test_dtype_suits_the_model_and_the_device_or_stops_the_start(
    monkeypatch, name, qwen, where, capability, expected
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(StartupError, match=expected) if type(expected) is str else nullcontext():
        assert device.choose_dtype(name, where, qwen=qwen) is expected


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.mark.parametrize("build", ["13.0", None])
def test_driver_too_old_stops_the_start_or_is_logged(
    monkeypatch: pytest.MonkeyPatch, build: str | None
) -> None:
    """With PyTorch's build for CPUs no GPU was expected, and nothing is logged."""

    def init() -> None:
        raise RuntimeError(f"{TOO_OLD}. Please update your GPU driver by downloading a new version")

    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(StartupError) as caught:
        device.choose_device("cuda:0")
    assert str(caught.value) == (
        f"DEVICE=cuda:0 needs an NVIDIA GPU that PyTorch {torch.__version__} can use, and it sees "
        f"none ({TOO_OLD}); check nvidia-smi and the driver, or set DEVICE=cpu"
    )
    with capture_logs() as logs:
        assert device.choose_device("auto") == CPU
    line = {"event": "no_gpu_used", "log_level": "warning", "reason": TOO_OLD, "device": "cpu"}
    assert logs == ([] if build is None else [line])


@pytest.fixture
def seen_gpu(monkeypatch):
    """Return a function that simulates a GPU and the architectures that PyTorch was built for."""

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


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        *((capability, CUDA_13, True) for capability in ((7, 5), (8, 9), (12, 1))),
        ((9, 4), ["gfx942"], True),  # A build for architectures of other makers is trusted.
        *((capability, CUDA_13, False) for capability in ((7, 0), (6, 1))),
        ((10, 0), ["sm_75", "sm_90"], False),
    ],
)
def test_gpu_needs_kernels_in_the_build_of_pytorch(seen_gpu, capability, built, runs) -> None:
    seen_gpu(capability, built)
    version = ".".join(map(str, capability))
    reason = (
        "PyTorch .* has no kernels for Some GPU, which has compute capability "
        f"{version}; .* with 7.5"
    )
    with capture_logs() as lines:
        assert device.choose_device("auto") == (CUDA if runs else CPU)
    if runs:
        assert device.choose_device("cuda:0") == torch.device("cuda:0")
        assert not lines
        return
    with pytest.raises(StartupError, match=f"DEVICE=cuda:0: {reason}; set DEVICE=cpu"):
        device.choose_device("cuda:0")
    (line,) = lines
    assert line["event"] == "no_gpu_used"
    assert re.fullmatch(reason, line["reason"])


@pytest.mark.parametrize(
    ("name", "has_mps", "chosen", "refusal"),
    [
        ("cpu", True, "cpu", None),
        ("cpu:1", True, "cpu", None),
        ("cuda", True, "cuda", None),
        ("cuda:0", True, "cuda:0", None),
        ("cuda:1", True, None, "DEVICE=cuda:1: there are only 1 GPUs"),
        ("mps", True, "mps", None),
        ("mps", False, None, "DEVICE=mps needs an Apple GPU, and there is none here"),
    ],
)
def test_named_device_is_used_or_refused(
    seen_gpu, monkeypatch, name, has_mps, chosen, refusal
) -> None:
    seen_gpu((9, 0), CUDA_13)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    with pytest.raises(StartupError, match=refusal) if refusal else nullcontext():
        assert device.choose_device(name) == torch.device(chosen)


def test_gpu_memory_is_read_and_freed(monkeypatch) -> None:
    done: list[str] = []
    for name, value in {
        "memory_allocated": lambda _: 1,
        "memory_reserved": lambda _: 2,
        "mem_get_info": lambda _: (3, 14),
        "get_device_properties": lambda _: SimpleNamespace(total_memory=5.0),
        "empty_cache": lambda: done.append("emptied"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 9)
    monkeypatch.setattr(device.gc, "collect", lambda: done.append("collected"))
    read = device.make_memory_reader(CUDA)
    kinds = ("allocated", "reserved", "free", "total")
    assert [read(kind) for kind in kinds] == [1, 2, 3, 14]
    assert device.memory_bytes(CUDA) == 5
    assert (device.make_memory_reader(CPU), device.memory_bytes(CPU)) == (None, None)
    assert device.memory_usage(CUDA) == MemoryUsage(used=11, total=14, own=2)
    assert device.memory_usage(MPS) == MemoryUsage(used=7, total=9, own=None)
    device.make_memory_freer(CPU)()
    device.make_memory_freer(CUDA)()
    assert done == ["collected", "collected", "emptied"]


@pytest.fixture
def in_groups(tmp_path: Path, monkeypatch):
    """Return a function that puts the process into control groups with limits and statistics."""

    def put(version: int, groups: dict[str, tuple[str, str]]) -> None:
        root, name = tmp_path / "memory", "memory.limit_in_bytes"
        membership = "5:memory,cpu:/service/one\n1:name=systemd:/x\n"
        if version == 2:
            root, name, membership = tmp_path, "memory.max", "0::/service/one\n"
        for group, (limit, statistics) in groups.items():
            (root / group).mkdir(parents=True, exist_ok=True)
            (root / group / name).write_text(f"{limit}\n", "ascii")
            (root / group / "memory.stat").write_text(statistics, "ascii")
        (tmp_path / "membership").write_text(membership, "ascii")
        monkeypatch.setattr(cpu, "_CGROUPS", tmp_path)
        monkeypatch.setattr(cpu, "_MEMBERSHIP", tmp_path / "membership")

    return put


@pytest.mark.parametrize(
    ("version", "groups", "expected"),
    [
        # Memory that the system cannot reclaim counts.
        (
            2,
            {
                "service/one": ("1000", "anon 700\nfile 9000\nkernel 20\nshmem 3\nk_stack 7\n"),
                "service": ("max", "anon 1\n"),
            },
            (723, 1000),
        ),
        # Version 1 has other names, and a large number for no limit.
        (
            1,
            {
                "service/one": ("1000", "cache 9\nrss 5\nshmem 2\ntotal_rss 400\ntotal_shmem 6\n"),
                "": (str(2**63 - 4096), "total_rss 1\n"),
            },
            (406, 1000),
        ),
        # The group or parent with the least memory left counts.
        (2, {"service/one": ("1000", "anon 1"), "service": ("500", "anon 300")}, (300, 500)),
        (2, {"service/one": ("1000", "anon 1"), "service": ("9000", "anon 8900")}, (8900, 9000)),
        (2, {}, None),
        (1, {}, None),
    ],
)
def test_control_group_usage_is_of_the_group_with_least_memory_left(
    in_groups, version, groups, expected
) -> None:
    in_groups(version, groups)
    usage = device.control_group_usage()
    assert (usage and (usage.used, usage.total)) == expected


@pytest.mark.parametrize(("bytes_more", "counts"), [(-1, True), (0, False), (1, False)])
def test_control_group_counts_if_its_limit_is_below_the_machines_memory(
    in_groups, bytes_more, counts
) -> None:
    machine_bytes = psutil.virtual_memory().total
    in_groups(2, {"service/one": (str(machine_bytes + bytes_more), "anon 7\n")})
    usage = device.memory_usage(CPU)
    assert (usage.used == 7, usage.total) == (counts, machine_bytes + bytes_more * counts)
    assert 0 < usage.used < usage.total
    assert 0 < usage.own < psutil.Process().memory_info().rss + (1 << 28)


GROWN = """
import numpy as np
from smart_embedder.hardware.device import measure_peak_growth

print(measure_peak_growth(lambda: np.ones(1 << 26, np.uint8)), measure_peak_growth(lambda: None))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports a peak")
def test_peak_growth_includes_memory_freed_before_the_end() -> None:
    """In a new process, since a copy of this one takes memory that was freed before."""
    done = run_script(GROWN)
    assert not done.returncode, done.stderr
    grown, idle = map(int, done.stdout.split())
    # The system first counts pages for each thread separately.
    assert 0.9 * (1 << 26) < grown < 1.3 * (1 << 26)
    assert idle < 0.3 * (1 << 26)


@pytest.mark.parametrize(
    ("seconds", "runs", "fastest"),
    [([0.1, 0.02, 0.05], 3, 0.02), ([0.05, 0.2, 0.01], 2, 0.05), ([0.2, 0.1], 1, 0.2)],
)
def test_time_fastest_run_repeats_long_runs_less(seconds, runs, fastest) -> None:
    at, done = 0.0, []

    def run() -> None:
        nonlocal at
        at += seconds[len(done)]
        done.append(at)

    assert device.time_fastest_run(run, lambda: at) == pytest.approx(fastest)
    assert len(done) == runs


@pytest.mark.parametrize(
    ("where", "broken", "error", "warnings"),
    [
        (CUDA, False, None, ["CUDA driver error: operation not supported"]),
        (CUDA, True, "not supported", []),  # The allocation fails without such segments, too.
        (CPU, True, None, []),  # A CPU has no such segments.
    ],
)
def test_expandable_segments_are_turned_off_if_they_fail(
    monkeypatch, where, broken, error, warnings
) -> None:
    fails = True

    def allocate(*_: object, device: torch.device) -> None:
        if fails:
            raise RuntimeError("CUDA driver error: operation not supported\nAt some place")

    def set_options(options: str) -> None:
        nonlocal fails
        fails = broken or options != "expandable_segments:False"

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_options)
    device.ensure_allocates.cache_clear()
    raised = pytest.raises(RuntimeError, match=error) if error else nullcontext()
    with capture_logs() as lines, raised:
        for _ in range(2):
            device.ensure_allocates(where)
    assert [line["reason"] for line in lines] == warnings
    assert {line["event"] for line in lines} <= {"expandable_segments_refused"}


def test_empty_cuda_cache_waits_for_a_capture(monkeypatch) -> None:
    calls = queue.SimpleQueue[bool]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.put(capturing_now.is_set()))
    capturing_now = threading.Event()
    with device.capture_lock:
        capturing_now.set()
        other = threading.Thread(target=device.empty_cuda_cache)
        other.start()
        capturing_now.clear()
    other.join()
    device.empty_cuda_cache()
    assert [calls.get_nowait(), calls.get_nowait()] == [False, False]
    assert calls.empty()
