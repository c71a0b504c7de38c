"""After the Ray Data job is killed and resumed, all rows are there once."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.heads.m3 import M3Embedder
from smart_embedder.requests import Outputs
from tests.deploy.ray.ray_cluster import BIN, LIMIT, RayCluster, environment
from tests.support.checkpoints import save_m3
from tests.support.qdrant.process import run_qdrant
from tests.support.server import REPOSITORY
from tests.support.waiting import wait_until

# Several waits of up to LIMIT each.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(5 * LIMIT)]

ROWS = 1500
# About 20 rows.
BLOCK = ["--block-bytes", "1000", "--block-rows", "20"]


@pytest.fixture
def embedder(tiny_m3: Path) -> M3Embedder:
    cpu = torch.device("cpu")
    target = Target(cpu, torch.float32, choose_backend(cpu, torch.float32))
    return M3Embedder("tiny-m3", tiny_m3, 8192, target)


class EmbedJob:
    """Runs `python -m deploy.ray.embed` repeatedly with the same arguments."""

    def __init__(self, cluster: RayCluster, model: Path, folder: Path, *arguments: str) -> None:
        self._cluster = cluster
        self.output = folder / "out"
        self._settings = {"EMBEDDING_MODEL": str(model), "RERANKER_MODEL": "none"}
        self._settings["DTYPE"] = "float32"  # Elsewhere auto means bfloat16, on some processors.
        options = ["--output", str(self.output), "--address", cluster.address, "--id-column", "key"]
        self._command = [BIN / "python", "-m", "deploy.ray.embed", *arguments, *options, *BLOCK]

    def start(self, log: Path, **settings: str) -> "subprocess.Popen[bytes]":
        with log.open("wb") as output:
            return subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=environment(DEVICE="cpu", **self._settings | settings),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill_after(self, blocks: int, log: Path, also: Callable[[], None] = lambda: None) -> int:
        """Start the job, kill it after this many blocks, and return the number of blocks."""
        before = len(self.blocks)
        process = self.start(log)

        def enough() -> bool:
            assert process.poll() is None, log.read_text()
            return len(self.blocks) >= before + blocks

        wait_until(enough, f"{blocks} blocks")
        also()
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        # Its workers end with it, and may still finish a block.
        wait_until(lambda: not self._cluster.embedders(), "no worker is left")
        return len(self.blocks)

    def finish(self, log: Path, **settings: str) -> str:
        process = self.start(log, **settings)
        assert process.wait(LIMIT) == 0, log.read_text()
        return log.read_text()

    @property
    def blocks(self) -> list[Path]:
        return list(self.output.glob("block-*"))


def rows() -> list[dict]:
    return [{"key": f"k{i}", "text": f"a text with the number {i}", "n": i} for i in range(ROWS)]


def write_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def test_job_is_resumed_after_kills_and_lost_workers(
    cluster: RayCluster, tiny_m3: Path, tmp_path: Path, embedder: M3Embedder
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")
    job = EmbedJob(cluster, tiny_m3, tmp_path, str(source), "--workers", "2")
    log = tmp_path / "job.log"
    first = job.kill_after(5, log)

    def kill_workers() -> None:
        workers = cluster.embedders()
        assert workers
        for worker in workers.values():
            worker.kill()

    second = job.kill_after(5, log, also=kill_workers)
    (job.output / ".block-left-over.parquet.1").write_bytes(b"half a file")
    output = job.finish(log)
    assert f"of which {second} are done already" in output
    table = pq.read_table(job.output)
    assert first < second < len(job.blocks)
    assert sorted(table["id"].to_pylist()) == sorted(row["key"] for row in rows())
    assert table["error"].null_count == ROWS
    assert not list(job.output.glob(".block-*"))
    places = range(0, ROWS, 100)
    texts = [table["text"][place].as_py() for place in places]
    sequences = [sequence.ids for sequence in embedder.tokenize(texts)]
    alone = embedder.launch(sequences, [Outputs(dense=True, sparse=True)] * len(texts))()
    for place, embedding in zip(places, alone, strict=True):
        np.testing.assert_allclose(table["dense"][place].as_py(), embedding.dense, atol=1e-5)
        assert table["sparse_indices"][place].as_py() == embedding.sparse.indices.tolist()
    assert "0 rows embedded" in job.finish(log)


def test_parquet_to_qdrant_is_resumed_with_the_same_points(
    cluster: RayCluster, tiny_m3: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows()), source, row_group_size=400)
    log = tmp_path / "job.log"
    with run_qdrant() as qdrant:
        job = EmbedJob(cluster, tiny_m3, tmp_path, str(source), "--qdrant", qdrant.url)
        job.kill_after(10, log)
        output = job.finish(log)
        assert "done already" in output
        uploads = qdrant.state("smart-embedder")["uploads"]
    assert len(uploads) == ROWS
    # Open blocks were sent again, with the same ids.
    assert sum(uploads.values()) < ROWS + 5 * 20


def test_invalid_line_is_an_error_of_its_row(
    cluster: RayCluster, tiny_m3: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n{"text": \n[1]\n{"text": null}\n\n{"text": "b"}\n')
    job = EmbedJob(cluster, tiny_m3, tmp_path, str(source))
    assert "2 rows embedded, 3 without a usable text" in job.finish(tmp_path / "job.log")
    table = pq.read_table(job.output).sort_by("id")
    errors = {row["id"]: row["error"] for row in table.to_pylist()}
    assert [*map(str, errors.values())] == [
        "None",
        errors["in.jsonl:14"],
        "the line is no JSON object",
        "the column text holds no text",
        "None",
    ]
    assert errors["in.jsonl:14"].startswith("the line is no JSON: ")


def test_missing_model_is_reported_in_one_sentence(cluster: RayCluster, tmp_path: Path) -> None:
    source, log = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "job.log"
    process = EmbedJob(cluster, tmp_path / "nowhere", tmp_path, str(source)).start(log)
    assert process.wait(LIMIT) == 1
    message = f"The job has stopped: the model folder {tmp_path / 'nowhere'} does not exist"
    assert message in log.read_text().splitlines()


def another_input(job: EmbedJob, source: Path, _model: Path) -> None:
    source.write_text('{"key": "other", "text": "another"}\n')


def other_weights(job: EmbedJob, _source: Path, model: Path) -> None:
    save_m3(model.with_name("other"), layers=1)
    for file in model.with_name("other").iterdir():
        file.replace(model / file.name)


def another_format(job: EmbedJob, _source: Path, _model: Path) -> None:
    """Vectors of a machine whose processor has bfloat16, which DTYPE=auto selects there."""
    record = job.output / "_vectors.json"
    record.write_text(record.read_text().replace("float32", "bfloat16"))


def nothing(*_: object) -> None:
    """Change nothing but the settings."""


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (another_input, {}, "belongs to another job (files differ)"),
        (nothing, {"BGE_EMBED_MAX_LENGTH": "7"}, "belongs to another job (reading differ)"),
        (other_weights, {}, "not those that the job began with (dense space: dense-"),
        (another_format, {}, "(dense dtype: float32, was bfloat16; sparse dtype: float32, was "),
    ],
)
def test_folder_of_another_job_is_refused(
    cluster: RayCluster, tiny_m3: Path, tmp_path: Path, change, settings, message: str
) -> None:
    model = shutil.copytree(tiny_m3, tmp_path / "model")
    source, log = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "job.log"
    job = EmbedJob(cluster, model, tmp_path, str(source))
    job.kill_after(1, log)
    change(job, source, model)
    process = job.start(log, **settings)
    assert process.wait(LIMIT) == 1
    assert message in log.read_text()
    stopped = "The job has stopped: on " if "dense" in message else "Nothing was embedded: "
    assert stopped in log.read_text()


def test_texts_are_read_as_documents(cluster: RayCluster, tiny_qwen: Path, tmp_path: Path) -> None:
    vectors = []
    for name, texts, prompt in (
        ("plain", "passage: a text", ""),
        ("prompt", "a text", "passage: "),
    ):
        folder = tmp_path / name
        folder.mkdir()
        source = folder / "in.jsonl"
        source.write_text(json.dumps({"text": texts}))
        job = EmbedJob(cluster, tiny_qwen, folder, str(source), "--kinds", "dense")
        job.finish(folder / "job.log", DOCUMENT_PROMPT=prompt)
        vectors.append(pq.read_table(job.output)["dense"][0].as_py())
    assert vectors[0] == vectors[1]
