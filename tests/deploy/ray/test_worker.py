"""Workers of a job on different machines must compute the same vectors."""

from pathlib import Path

import pytest

from app.settings import Settings
from deploy.ray import worker
from deploy.ray.blocks import InputError
from deploy.ray.worker import BlockEmbedder, Job
from smart_embedder.kernels import native
from smart_embedder.requests import Outputs


@pytest.fixture
def start_worker(tiny_m3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start a worker as on a processor with only these `kernels`."""

    workers = []
    # Loggers would keep this configuration for all tests of this process.
    monkeypatch.setattr(worker, "configure_logs", lambda *_: None)

    def start(kernels: native.InstructionSet, dtype: str) -> None:
        monkeypatch.setattr(native, "runnable_instruction_sets", lambda: [kernels])
        native.load_library.cache_clear()
        settings = Settings(
            embedding_model=str(tiny_m3), reranker_model="none", device="cpu", dtype=dtype
        )
        outputs = Outputs(dense=True, sparse=True)
        workers.append(BlockEmbedder(Job(settings, "text", None, outputs, str(tmp_path))))

    yield start
    for started in workers:
        started.close()
    native.load_library.cache_clear()


def test_workers_may_differ_in_kernels_but_not_in_dtype(
    start_worker,
) -> None:
    sets = native.runnable_instruction_sets()
    if len(sets) < 2:
        pytest.skip("this processor has one set of instructions that there are kernels for")
    start_worker(sets[0], "float32")
    start_worker(sets[-1], "float32")
    with pytest.raises(InputError, match="dense dtype: bfloat16, was float32"):
        start_worker(sets[0], "bfloat16")
