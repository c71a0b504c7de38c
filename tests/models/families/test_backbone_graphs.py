"""Small batches as CUDA graphs on a simulated device: what is launched, copied and waited for."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.engine.records import Outputs, TokenIds
from smart_embedder.models import cuda_graphs
from smart_embedder.models.cuda_graphs import Bucket, GraphedForward
from smart_embedder.models.families import backbone
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.loader import EntryLoader, load
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.tasks.dense import M3Embedder, load_m3_embedder
from smart_embedder.models.tasks.qwen3 import QwenReranker, load_qwen_reranker
from smart_embedder.settings import Settings
from smart_embedder.settings.types import ModelEntry
from tests.support.cuda_checks import CudaMisuseError
from tests.support.simulated_cuda import SimulatedCuda, simulated_cuda

DEVICE = torch.device("cuda:0")
EVERY = Outputs(dense=True, sparse=True, colbert=True, states=True)
BUCKETS = (Bucket(32, 4, 32), Bucket(64, 8, 64))
# The copies of ids, positions, lengths and states beside the graph, and those of the heads.
WITH_GRAPH = 5


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    monkeypatch.setattr(backbone, "make_buckets", lambda: iter(BUCKETS))
    monkeypatch.setattr(
        cuda_graphs, "_seconds", lambda forward, _: 1 if isinstance(forward, GraphedForward) else 2
    )
    with simulated_cuda() as device:
        yield device


def target(dtype: torch.dtype) -> Target:
    return Target(DEVICE, dtype, choose_backend(DEVICE, dtype))


def load_m3(folder: Path, dtype: torch.dtype = torch.float16) -> M3Embedder:
    return load_m3_embedder("m3", folder, 8192, target(dtype))


def load_with_graphs(folder: Path, dtype: torch.dtype = torch.float16) -> M3Embedder:
    model = load_m3(folder, dtype)
    model.capture_graphs()
    return model


def sequences(*lengths: int) -> list[TokenIds]:
    return [np.full(length, 5, np.int64) for length in lengths]


def test_a_small_batch_is_one_launch_and_a_large_one_as_many_as_before(
    cuda: SimulatedCuda, tiny_m3: Path
) -> None:
    model = load_with_graphs(tiny_m3)
    assert model.info.paths["launch"] == "graphs"
    for lengths in (7,), (20, 1, 3), (64,), (8,) * 8:
        with cuda.forward() as launches:
            collect = model.launch(sequences(*lengths), [Outputs(dense=True)] * len(lengths))
        assert launches["graph"] == 1
        assert launches.total() == WITH_GRAPH + 1
        assert len(collect()) == len(lengths)
    for lengths in (65,), (1,) * 9:
        with cuda.forward() as launches:
            model.launch(sequences(*lengths), [Outputs(dense=True)] * len(lengths))
        assert launches["graph"] == 0
        assert launches["_flash_attention_forward"] == 2


def test_pairs_that_begin_alike_are_one_launch_too(cuda: SimulatedCuda, tiny_qwen: Path) -> None:
    model: QwenReranker = load_qwen_reranker("qwen", tiny_qwen, 512, 16, target(torch.bfloat16))
    model.capture_graphs()
    with cuda.forward() as launches:
        collect = model.launch(sequences(20, 20, 20), [EVERY] * 3)
    assert launches["graph"] == 1
    assert launches["_flash_attention_forward"] == 0
    assert len(collect()) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_two_batches_under_way_do_not_touch_each_others_results(
    cuda: SimulatedCuda, tiny_m3: Path, dtype: torch.dtype
) -> None:
    model = load_with_graphs(tiny_m3, dtype)
    for _ in range(3):
        with cuda.forward() as launches:
            first = model.launch(sequences(5, 9), [EVERY] * 2)
            second = model.launch(sequences(30), [EVERY])
        assert launches["graph"] == 2
        assert len(second()) == 1
        assert len(first()) == 2


def test_results_that_lie_where_the_graph_writes_would_be_noticed(
    cuda: SimulatedCuda, tiny_m3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_with_graphs(tiny_m3, torch.float32)
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)
    model.launch(sequences(5), [EVERY])
    with pytest.raises(CudaMisuseError, match="a copy still reads"):
        model.launch(sequences(9), [EVERY])


def test_without_memory_for_a_graph_all_is_launched_plainly(
    cuda: SimulatedCuda, tiny_m3: Path
) -> None:
    model = load_m3(tiny_m3)
    cuda.out_of_memory_at_capture = True
    with capture_logs() as logs:
        model.capture_graphs()
    assert [line["event"] for line in logs] == ["path_refused"]
    assert model.info.paths["launch"] == "eager"
    assert [(each.operation, each.path) for each in model.info.refused] == [("launch", "graphs")]
    check_plain(cuda, model)


def test_after_a_capture_that_cuda_ended_the_device_works_and_its_memory_is_reused(
    cuda: SimulatedCuda, tiny_m3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_m3(tiny_m3)
    told = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *arguments, name=name: told.append((name, *arguments))
        )
    cuda.fails_at_capture_end = True
    model.capture_graphs()
    assert told == [("_cuda_endAllocateToPool", 0, (0, 1)), ("_cuda_releasePool", 0, (0, 1))]
    assert model.info.refused[0].reason == "raises RuntimeError"
    check_plain(cuda, model)


def check_plain(cuda: SimulatedCuda, model: M3Embedder) -> None:
    assert cuda.current is cuda.main
    with cuda.forward() as launches:
        collect = model.launch(sequences(5, 9), [EVERY] * 2)
    assert launches["graph"] == 0
    assert len(collect()) == 2


def test_the_budget_is_measured_beside_the_memory_of_every_models_graphs(
    cuda: SimulatedCuda, tiny_m3: Path, tiny_reranker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures_before = []

    def free_memory(*_: object) -> tuple[int, int]:
        captures_before.append(cuda.captures)
        return 2**20, 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_memory)
    models = load(
        Settings(embedding_model=str(tiny_m3), reranker_model=str(tiny_reranker), device="cuda:0")
    )
    assert [info.paths["launch"] for info in models.infos] == ["graphs", "graphs"]
    assert set(captures_before) == {2 * len(BUCKETS)}


def test_a_model_that_is_loaded_later_has_graphs_and_others_are_launched_meanwhile(
    cuda: SimulatedCuda, tiny_m3: Path, tiny_reranker: Path
) -> None:
    serving = load_with_graphs(tiny_m3)
    settings = Settings(
        embedding_model=str(tiny_m3), reranker_model="none", device="cuda:0", dtype="float16"
    )
    entry = ModelEntry(name=str(tiny_reranker), task="rerank")
    placed = EntryLoader(settings).plan(entry).load()
    (placed_model,) = placed.models
    steps = placed_model.measure(False)
    measured = None
    served = 0
    while measured is None:
        measured = next(steps)
        with cuda.forward() as launches:
            collect = serving.launch(sequences(5, 9), [EVERY] * 2)
        assert launches["graph"] == 1
        assert len(collect()) == 2
        served += 1
    assert served > 3 * len(BUCKETS)
    assert placed.describe().paths["launch"] == "graphs"
    with cuda.forward() as launches:
        collect_scores = placed_model.model.launch(sequences(7), [Outputs()])
    assert launches["graph"] == 1
    assert len(collect_scores()) == 1
