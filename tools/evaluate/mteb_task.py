"""A retrieval task of mteb that lies on the disk. mteb is imported here alone."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import mteb
from mteb.abstasks import AbsTaskRetrieval

from tools.evaluate.dataset import Dataset, DatasetError, Document, document_text, make_dataset


class MtebCorpus:
    """A corpus as mteb loads it: a table in a file that is mapped into memory."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def read(self, indices: Iterable[int]) -> list[Document]:
        """The documents with these indices."""
        rows = (self._table[index] for index in indices)
        return [Document(str(row["id"]), document_text(row)) for row in rows]


def read_mteb(name: str, folder: Path | None, split: str, subset: str) -> Dataset:
    """The task `name`, from `folder`, a snapshot of its repository, or from the hub's cache.

    Raises `DatasetError` where mteb has no such retrieval task, or cannot load it.
    """
    task = _find_task(name)
    if folder is not None:
        source = {"path": str(folder.resolve()), "revision": None}
        task.metadata = task.metadata.model_copy(update={"dataset": source})
    try:
        with nullcontext() if folder is None else _own_cache(folder):
            task.load_data()
        task.convert_v1_dataset_format_to_v2(num_proc=None)
        data = task.dataset[subset][split]
    except Exception as error:  # Whatever its libraries raise, the task is not there.
        raise DatasetError(f"the task {name} cannot be loaded: {error!r}") from error
    queries = {str(row["id"]): _query_text(name, row) for row in data["queries"]}
    named = data["top_ranked"]
    candidates = named and {query: frozenset(documents) for query, documents in named.items()}
    return make_dataset(
        name,
        MtebCorpus(data["corpus"]),
        queries,
        data["relevant_docs"],
        candidates=candidates or None,
        ignores_identical_ids=task.ignore_identical_ids,
    )


def _find_task(name: str) -> AbsTaskRetrieval:
    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise DatasetError(f"mteb has no task {name}: {error}") from None
    if not isinstance(task, AbsTaskRetrieval) or "text" not in task.metadata.modalities:
        raise DatasetError(f"the task {name} is no retrieval task of texts")
    return task


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Let datasets read the files as they are now.

    Of a folder it knows the name and the names of its files, and takes what it read before of
    another with the same, or before the files were changed.
    """
    files = sorted(path for path in folder.resolve().rglob("*") if path.is_file())
    stats = [path.stat() for path in files]
    states = [(each.st_size, each.st_mtime_ns) for each in stats]
    digest = hashlib.sha256(repr([*zip(files, states, strict=True)]).encode()).hexdigest()
    usual = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = Path(usual) / f"folder-{digest[:16]}"
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = usual


def _query_text(name: str, row: dict[str, Any]) -> str:
    """A query and the instruction behind it, where it has one, as mteb reads them."""
    if not isinstance(row["text"], str):
        raise DatasetError(f"the queries of the task {name} are conversations, which are not read")
    return f"{row['text']} {row.get('instruction') or ''}".strip()
