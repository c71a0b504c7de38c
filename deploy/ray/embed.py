"""Embeds JSONL or Parquet of any size, on every worker of a Ray cluster.

    python -m deploy.ray.embed articles.jsonl --output vectors
    python -m deploy.ray.embed articles/ --output state --qdrant http://localhost:6333

A job that was killed is resumed by the same command: blocks that are done are left out.
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
_OUR_ERROR = re.compile(r"(?m)^(?:smart_embedder|deploy)[.\w]*\.\w+Error: (.+)$")
_KINDS = ("dense", "sparse", "colbert")


def main() -> None:
    """Run the job that the command line asks for."""
    arguments = _parser().parse_args()
    try:
        embedded, failed = run(arguments)
    except (InputError, StartupError) as error:
        sys.exit(f"Nothing was embedded: {error}")
    except (RayError, UserCodeException) as error:
        sys.exit(f"The job has stopped: {_reason(error)}\nThe same command resumes it.")
    print(f"{embedded} rows embedded, {failed} without a usable text")


def _reason(error: Exception) -> str:
    """What the service says in the traceback of a worker, or else Ray."""
    told = _OUR_ERROR.findall(str(error))
    return str(told[-1]) if told else str(error).strip().partition("\n")[0]


def run(arguments: argparse.Namespace) -> tuple[int, int]:
    """The numbers of rows that were embedded now, and that could not be.

    Raises `InputError` for input that cannot be read, or an output folder of another job.
    """
    job = _job(arguments)
    source = find_input(arguments.input)
    blocks = [
        block
        for label, path in source.files.items()
        for block in list_blocks(label, path, arguments.block_rows, arguments.block_bytes)
    ]
    _claim(Path(job.folder), _manifest(job, source, arguments))
    if source.not_read:
        others = ", ".join(f"{count} {ending}" for ending, count in source.not_read.most_common())
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
    """Make the collection as wide as the models' vectors, which a worker knows."""
    # Once in a process, which ends with it, and its models.
    remote = ray.remote(num_cpus=arguments.cpus, num_gpus=arguments.gpus, max_calls=1)
    widths = remote(lambda: BlockEmbedder(job).widths).remote()
    job.qdrant_output(url).create(job.outputs, *ray.get(widths))


def _claim(folder: Path, manifest: dict[str, Any]) -> None:
    """Make the folder this job's; raise `InputError` where it is another's."""
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
            f"{folder} holds what another job has made ({', '.join(changed)} differ): choose "
            "another folder, or remove this one to begin anew"
        )


def _manifest(job: Job, source: Input, arguments: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for a job to be resumed; the workers add the models' identity to it."""
    states = {
        label: [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for label, path in source.files.items()
    }
    own = job.settings
    revisions = [own.model_revision, own.dense_model_revision]
    return {
        "files": states,
        "columns": [job.text_column, job.id_column],
        "kinds": [kind for kind in _KINDS if getattr(job.outputs, kind)],
        "collection": [job.qdrant, job.collection],
        "models": [own.embedding_model, own.dense_model, *revisions],
        "reading": [
            own.embed_max_length,
            own.qwen_embed_max_length,
            own.pooling,
            own.normalize,
            own.document_prompt,
            own.dtype,
        ],
        "blocks": [arguments.block_rows, arguments.block_bytes],
    }


def _job(arguments: argparse.Namespace) -> Job:
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
    add("--id-column", help="the column that names a row (its place in the file)")
    add("--kinds", default="dense,sparse", help="some of dense,sparse,colbert (%(default)s)")
    add(
        "--qdrant",
        metavar="URL",
        help="a Qdrant to store points in, instead of Parquet; QDRANT_API_KEY is its key",
    )
    add("--collection", default="smart-embedder", help="the collection in Qdrant (%(default)s)")
    add("--workers", type=int, default=1, help="the most engines at a time (%(default)s)")
    add("--cpus", type=float, default=1, help="CPUs of each engine (%(default)g)")
    add("--gpus", type=float, default=0, help="GPUs of each engine, such as 0.5 (%(default)g)")
    add("--block-rows", type=int, default=4096, help="rows of a block of Parquet (%(default)s)")
    add("--block-bytes", type=int, default=2**22, help="bytes of a block of JSONL (%(default)s)")
    add("--address", help="the Ray cluster (RAY_ADDRESS, else one on this machine)")
    return parser


if __name__ == "__main__":
    main()
