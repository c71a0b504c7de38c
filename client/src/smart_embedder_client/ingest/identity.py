"""Names of documents and points that follow from their content, so that a second run finds them."""

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smart_embedder_client.ingest.documents import Document

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "smart-embedder/ingest")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """All options that decide what a text becomes.

    `vectors` are those of the vectors, such as the models' names; `splitting` those of the chunks.
    """

    dataset: str
    vectors: tuple[Any, ...]
    splitting: tuple[Any, ...]


def document_digest(document: Document, recipe: Recipe) -> bytes:
    """16 bytes that change with the document and with every option."""
    parts = (*_of_document(document, recipe), recipe.splitting, document.text)
    return hashlib.blake2b(_encode(parts), digest_size=_DIGEST_BYTES).digest()


def chunk_ids(document: Document, chunks: Sequence[str], recipe: Recipe) -> list[str]:
    """A UUID for each chunk; one that is unchanged in a changed document keeps it."""
    common = hashlib.sha256(_encode(_of_document(document, recipe))).hexdigest()
    occurrences: Counter[str] = Counter()
    ids = []
    for chunk in chunks:
        ids.append(str(uuid.uuid5(_NAMESPACE, f"{common} {occurrences[chunk]} {chunk}")))
        occurrences[chunk] += 1
    return ids


def _of_document(document: Document, recipe: Recipe) -> tuple[Any, ...]:
    return (recipe.dataset, recipe.vectors, document.source, document.key, document.metadata)


def _encode(parts: tuple[Any, ...]) -> bytes:
    return json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()
