"""Which device and which number format are taken, what is said where one cannot be; its memory.

Only PyTorch's own answers are replaced: no machine that runs these tests has so old a driver.
"""

import platform
import queue
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.models.device import choose as device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capabilities", "system", "auto", "int8"),
    [
        (("avx2", "amx_int8", "amx_bf16"), "Linux", torch.bfloat16, None),
        (("avx2", "avx512_bf16"), "Darwin", torch.bfloat16, None),
        (("avx2",), "Linux", torch.float32, None),
        (("avx", "sse4_2"), "Linux", torch.float32, "DTYPE=int8 needs an x86 processor with AVX2"),
        (("bf16", "dot", "i8mm"), "Linux", torch.bfloat16, None),
        (("bf16", "dot", "i8mm"), "Darwin", torch.float32, "on Linux one of ARM's with dot"),
    ],
)
def test_on_a_cpu_what_is_native_is_taken_for_all_or_beside_int8(
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


def test_formats_of_the_other_kind_of_device_stop_the_start() -> None:
    assert device.choose_dtype("float16", CUDA) is torch.float16
    assert device.choose_dtype("float32", CPU) is torch.float32
    with pytest.raises(StartupError, match="DTYPE=float16 is for GPUs; on a CPU use bfloat16"):
        device.choose_dtype("float16", CPU)
    with pytest.raises(StartupError, match="DTYPE=int8 is for CPUs, and the models run on cuda"):
        device.choose_dtype("int8", CUDA)


@pytest.mark.parametrize(
    ("other", "capability"),
    [(CPU, (0, 0)), (torch.device("mps"), (0, 0)), (CUDA, (8, 6)), (CUDA, (8, 9)), (CUDA, (9, 0))],
)
def test_float8_is_for_gpus_from_ada_on_and_the_rest_is_in_bfloat16(
    monkeypatch, other, capability
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if capability >= (8, 9):
        assert device.choose_dtype("float8", other) is torch.bfloat16
        return
    with pytest.raises(StartupError, match=f"DTYPE=float8 needs .*, and the models run on {other}"):
        device.choose_dtype("float8", other)


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


@pytest.mark.parametrize("for_cpus", [False, True])
def test_auto_says_why_it_passes_over_the_gpu_unless_the_build_is_for_cpus(
    old_driver, monkeypatch: pytest.MonkeyPatch, for_cpus: bool
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    if for_cpus:
        monkeypatch.setattr(torch.version, "cuda", None)
    with capture_logs() as logs:
        assert device.choose_device("auto") == torch.device("cpu")
    reason = "The NVIDIA driver on your system is too old (found version 11040)"
    line = {"event": "no_gpu_used", "log_level": "warning", "reason": reason, "device": "cpu"}
    assert logs == ([] if for_cpus else [line])


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


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        *((each, CUDA_13) for each in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 1))),
        ((9, 4), ["gfx942"]),  # A build that names other architectures is taken at its word.
    ],
)
def test_a_gpu_that_the_build_has_kernels_for_is_taken(seen_gpu, capability, built) -> None:
    seen_gpu(capability, built)
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
def test_a_device_that_is_named_is_taken_or_said_not_to_be_there(
    seen_gpu, monkeypatch, name, has_mps, chosen, refusal
) -> None:
    seen_gpu((9, 0), CUDA_13)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    with pytest.raises(StartupError, match=refusal) if refusal else nullcontext():
        assert device.choose_device(name) == torch.device(chosen)


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


MEMBERSHIP = {"v2": "0::/service/one\n", "v1": "5:memory,cpu:/service/one\n1:name=systemd:/x\n"}


def make_groups(root: Path, version: str, groups: dict[str, tuple[str, str]]) -> tuple[Path, Path]:
    """Control groups with a limit and statistics, and the process in one of them."""
    name = "memory.max" if version == "v2" else "memory.limit_in_bytes"
    for folder, (limit, statistics) in groups.items():
        path = root / ("" if version == "v2" else "memory") / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{limit}\n", "ascii")
        (path / "memory.stat").write_text(statistics, "ascii")
    (root / "membership").write_text(MEMBERSHIP[version], "ascii")
    return root, root / "membership"


@pytest.mark.parametrize(
    ("version", "groups", "expected"),
    [
        # What cannot be taken back counts.
        (
            "v2",
            {
                "service/one": (
                    "1000",
                    "anon 700\nfile 9000\nkernel 20\nshmem 3\nk_stack 7\n",
                ),
                "service": ("max", "anon 1\n"),
            },
            (723, 1000),
        ),
        # The other version has other names, and a number for no limit.
        (
            "v1",
            {
                "service/one": ("1000", "cache 9\nrss 5\nshmem 2\ntotal_rss 400\ntotal_shmem 6\n"),
                "": (str(2**63 - 4096), "total_rss 1\n"),
            },
            (406, 1000),
        ),
        # The lowest limit of a group and of those above.
        (
            "v2",
            {"service/one": ("1000", "anon 1\n"), "service": ("500", "anon 300\n")},
            (300, 500),
        ),
        ("v2", {}, None),
        ("v1", {}, None),
    ],
)
def test_the_control_group_with_the_lowest_limit_counts(
    tmp_path: Path, version, groups, expected
) -> None:
    usage = device.control_group_usage(*make_groups(tmp_path, version, groups))
    assert (usage and (usage.used, usage.total)) == expected


def test_no_more_than_the_machine_has_is_in_use() -> None:
    usage = device.memory_usage(CPU)
    assert 0 < usage.used < usage.total <= psutil.virtual_memory().total


@pytest.mark.parametrize(("bytes_more", "counts"), [(-1, True), (0, False), (1, False)])
def test_a_group_counts_where_its_limit_is_below_what_the_machine_has(
    tmp_path, monkeypatch, bytes_more, counts
) -> None:
    limit = psutil.virtual_memory().total + bytes_more
    groups = make_groups(tmp_path, "v2", {"service/one": (str(limit), "anon 7\n")})
    for name, path in zip(("CGROUPS", "MEMBERSHIP"), groups, strict=True):
        monkeypatch.setattr(device, name, path)
    usage = device.memory_usage(CPU)
    assert (usage.used == 7, usage.total == limit) == (counts, counts or not bytes_more)
    assert 0 < usage.own < psutil.Process().memory_info().rss + (1 << 28)


def test_on_other_devices_it_is_that_of_their_drivers(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 9)
    usage = device.memory_usage(CUDA)
    assert (usage.used, usage.total, usage.own) == (70, 100, 50)
    usage = device.memory_usage(torch.device("mps"))
    assert (usage.used, usage.total, usage.own) == (7, 9, None)


@pytest.mark.parametrize(
    ("seconds", "runs", "shortest_of_them"),
    [([0.1, 0.02, 0.05], 3, 0.02), ([0.05, 0.2, 0.01], 2, 0.05), ([0.2, 0.1], 1, 0.2)],
)
def test_the_shortest_of_a_few_runs_counts_and_long_ones_are_repeated_less(
    seconds, runs, shortest_of_them
) -> None:
    at, done = 0.0, []

    def run() -> None:
        nonlocal at
        at += seconds[len(done)]
        done.append(at)

    assert device.shortest(run, lambda: at) == pytest.approx(shortest_of_them)
    assert len(done) == runs


@pytest.mark.parametrize(
    ("where", "broken", "error", "warnings"),
    [
        (CUDA, False, None, ["CUDA driver error: operation not supported"]),
        (CUDA, True, "not supported", []),  # Not even without them.
        (CPU, True, None, []),  # It has no such segments.
    ],
)
def test_where_expandable_segments_fail_the_start_goes_on_without_them(
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


def test_memory_is_given_back_each_time_and_in_no_capture(monkeypatch) -> None:
    calls = queue.SimpleQueue[bool]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.put(capturing_now.is_set()))
    capturing_now = threading.Event()
    with device.capturing:
        capturing_now.set()
        other = threading.Thread(target=device.empty_cuda_cache)
        other.start()
        capturing_now.clear()
    other.join()
    device.empty_cuda_cache()
    assert [calls.get_nowait(), calls.get_nowait()] == [False, False]
    assert calls.empty()
