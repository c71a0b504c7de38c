"""Embed JSONL or Parquet of any size on all workers of a Ray cluster.

    python -m deploy.ray.embed articles.jsonl --output vectors
    python -m deploy.ray.embed articles/ --output state --qdrant http://localhost:6333

The same command resumes a job that was killed: blocks that are done are left out.
"""

import argparse
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import ray
from ray.data import ActorPoolStrategy
from ray.data.exceptions import UserCodeException
from ray.exceptions import RayError

from app.settings import load_settings
from deploy.ray.blocks import Block, Input, InputError, find_input, list_blocks
from deploy.ray.worker import BlockEmbedder, Job
from smart_embedder.errors import StartupError
from smart_embedder.requests import Outputs

_MANIFEST = "_job.json"
_ERROR_LINE = re.compile(r"(?m)^(?:smart_embedder|deploy)[.\w]*\.\w+Error: (.+)$")
_KINDS = ("dense", "sparse", "colbert")


def main() -> None:
    """Run the command."""
    arguments = _parser().parse_args()
    try:
        embedded, failed = run(arguments)
    except (InputError, StartupError) as error:
        sys.exit(f"Nothing was embedded: {error}")
    except (RayError, UserCodeException) as error:
        sys.exit(f"The job has stopped: {_extract_reason(error)}\nThe same command resumes it.")
    print(f"{embedded} rows embedded, {failed} without a usable text")


def _extract_reason(error: Exception) -> str:
    """Return the service's error in the traceback of a worker, or the first line of Ray's."""
    reasons = _ERROR_LINE.findall(str(error))
    return str(reasons[-1]) if reasons else str(error).strip().partition("\n")[0]


def run(arguments: argparse.Namespace) -> tuple[int, int]:
    """Run the job, and return the numbers of embedded and of failed rows.

    Raises `InputError` if the input cannot be read, or the output folder belongs to another job.
    """
    job = _read_job(arguments)
    source = find_input(arguments.input)
    blocks = [
        block
        for label, path in source.files.items()
        for block in list_blocks(label, path, arguments.block_rows, arguments.block_bytes)
    ]
    _claim_folder(Path(job.folder), _make_manifest(job, source, arguments))
    if source.skipped:
        others = ", ".join(f"{count} {suffix}" for suffix, count in source.skipped.most_common())
        print(f"not read, because they are neither JSONL nor Parquet: {others}")
    output = job.output()
    waiting = [block for block in blocks if not output.is_done(block.name)]
    print(f"{len(blocks)} blocks, of which {len(blocks) - len(waiting)} are done already")
    if not waiting:
        return 0, 0
    ray.init(address=arguments.address, ignore_reinit_error=True, log_to_driver=True)
    return _embed(job, waiting, arguments)


def _embed(job: Job, blocks: list[Block], arguments: argparse.Namespace) -> tuple[int, int]:
    if job.qdrant is not None:
        _create_collection(job, job.qdrant, arguments)
    items = [{"block": orjson.dumps(asdict(block)).decode()} for block in blocks]
    done = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        BlockEmbedder,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ActorPoolStrategy(min_size=1, max_size=arguments.workers),
        num_cpus=arguments.cpus,
        num_gpus=arguments.gpus,
    )
    embedded = failed = 0
    for row in done.iter_rows():
        embedded += int(row["embedded"])
        failed += int(row["failed"])
    return embedded, failed


def _create_collection(job: Job, url: str, arguments: argparse.Namespace) -> None:
    """Create the collection, with the widths of the models' vectors, which a worker knows."""
    # max_calls=1: the worker's process ends after the call, and frees the models.
    remote = ray.remote(num_cpus=arguments.cpus, num_gpus=arguments.gpus, max_calls=1)
    widths = remote(lambda: BlockEmbedder(job).widths).remote()
    job.qdrant_output(url).create(job.outputs, *ray.get(widths))


def _claim_folder(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the job's manifest; raise `InputError` if the folder has that of another job."""
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".block-*"):
        unfinished.unlink(missing_ok=True)
    file, content = folder / _MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
    if not file.exists():
        unfinished = folder / f".{_MANIFEST}.{os.getpid()}"
        unfinished.write_bytes(content)
        unfinished.replace(file)
    known = orjson.loads(file.read_bytes())
    if known != orjson.loads(content):
        changed = [name for name in manifest if known.get(name) != manifest[name]]
        raise InputError(
            f"{folder} belongs to another job ({', '.join(changed)} differ): choose another "
            "folder, or remove this one to start again"
        )


def _make_manifest(job: Job, source: Input, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values that must not change before a job is resumed."""
    states = {
        label: [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for label, path in source.files.items()
    }
    settings = job.settings
    revisions = [settings.model_revision, settings.dense_model_revision]
    return {
        "files": states,
        "columns": [job.text_column, job.id_column],
        "kinds": [kind for kind in _KINDS if getattr(job.outputs, kind)],
        "collection": [job.qdrant, job.collection],
        "models": [settings.embedding_model, settings.dense_model, *revisions],
        "reading": [
            settings.embed_max_length,
            settings.qwen_embed_max_length,
            settings.pooling,
            settings.normalize,
            settings.document_prompt,
            settings.dtype,
        ],
        "blocks": [arguments.block_rows, arguments.block_bytes],
    }


def _read_job(arguments: argparse.Namespace) -> Job:
    kinds = {kind.strip() for kind in arguments.kinds.split(",")}
    if not kinds <= set(_KINDS):
        raise InputError(f"--kinds is {arguments.kinds}: name some of {', '.join(_KINDS)}")
    return Job(
        settings=load_settings(),
        text_column=arguments.text_column,
        id_column=arguments.id_column,
        outputs=Outputs.of(kinds),
        folder=str(arguments.output.resolve()),
        qdrant=arguments.qdrant,
        collection=arguments.collection if arguments.qdrant else "",
        api_key=os.environ.get("QDRANT_API_KEY"),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray.embed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("input", nargs="+", type=Path, help="files, or folders of files")
    add("--output", type=Path, required=True, help="the folder for vectors and progress")
    add("--text-column", default="text", help="the column that is embedded (%(default)s)")
    add("--id-column", help="the column that identifies a row (its location in the file)")
    add("--kinds", default="dense,sparse", help="some of dense,sparse,colbert (%(default)s)")
    add(
        "--qdrant",
        metavar="URL",
        help="store points in this Qdrant, instead of Parquet; QDRANT_API_KEY is its key",
    )
    add("--collection", default="smart-embedder", help="the collection in Qdrant (%(default)s)")
    add("--workers", type=int, default=1, help="maximum number of engines (%(default)s)")
    add("--cpus", type=float, default=1, help="CPUs of each engine (%(default)g)")
    add("--gpus", type=float, default=0, help="GPUs of each engine, such as 0.5 (%(default)g)")
    add("--block-rows", type=int, default=4096, help="rows per block of Parquet (%(default)s)")
    add("--block-bytes", type=int, default=2**22, help="bytes per block of JSONL (%(default)s)")
    add("--address", help="the Ray cluster (RAY_ADDRESS, else one on this machine)")
    return parser


if __name__ == "__main__":
    main()
