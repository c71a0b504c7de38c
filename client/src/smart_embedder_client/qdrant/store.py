"""The interface of a Qdrant collection: its vectors, its operations and its errors."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from smart_embedder_client.answers import Embeddings, SparseVector
from smart_embedder_client.errors import VECTOR_SPACE_DIFFERS, SmartEmbedderError
from smart_embedder_client.options import EmbedOptions
from smart_embedder_client.safetensors import Array

_DISK_FULL = ("no space", "disk is full", "out of disk", "insufficient storage")
Datatype = Literal["float32", "float16", "uint8"]
DENSE, SPARSE, COLBERT = KINDS = ("dense", "sparse", "colbert")
COSINE = "Cosine"
# Qdrant's reciprocal rank fusion: with the constant 1 a text gets weight / rank of each ranking.
# Dense vectors weigh 3 and sparse ones 1, so that a poor lexical ranking does little harm.
RRF_CONSTANT = 1
RRF_WEIGHTS: Mapping[str, float] = {DENSE: 3.0, SPARSE: 1.0}
# Qdrant refuses a multivector of this many numbers or more.
MULTIVECTOR_NUMBERS = 1_048_576
# The default `m` (edges of a node) of Qdrant's HNSW graph.
DEFAULT_EDGES = 16
# The keys of a point's payload.
TEXT, SOURCE, DATASET, MODEL, METADATA = "text", "source", "dataset", "model", "metadata"
# The metadata of a chunk of HTML: the headings above it, and the anchor of its section.
HEADINGS, ANCHOR = "headings", "anchor"
PAGE = 1_000
EDGE = "edge:"
# The key of a collection's metadata for its `Origin`.
ORIGIN_KEY = "smart-embedder"


class QdrantError(Exception):
    """A request to Qdrant failed, and would fail again."""


class QdrantRefusedError(QdrantError):
    """Qdrant refuses a point of the request; without it, the others may be stored."""


class QdrantBusyError(QdrantError):
    """Qdrant cannot be reached or is busy: the same request may succeed later.

    Attributes:
        retry_after: Seconds after which to try again; None if Qdrant names none.
    """

    def __init__(self, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class QdrantFullError(QdrantError):
    """Qdrant has no space left."""


@contextmanager
def same_space(collection: str) -> Iterator[None]:
    """Raise the service's error `vector_space_differs` as `QdrantError`."""
    try:
        yield
    except SmartEmbedderError as error:
        if error.code != VECTOR_SPACE_DIFFERS:
            raise
        detail = error.detail.rstrip(".")
        difference = detail.partition(" names: ")[2] or detail
        raise QdrantError(
            f"the service's vectors are of another space than those of the collection {collection} "
            f"({difference}): use a service with the same model and settings, or embed the texts "
            f"again: {reembed_command(collection)}"
        ) from error


def reembed_command(collection: str) -> str:
    """Return the command that embeds the texts of a collection again."""
    return f"smart-embedder ingest --from-collection {collection} --collection NEW"


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """One named vector of a collection."""

    size: int
    distance: str = COSINE
    datatype: Datatype = "float32"
    is_multivector: bool = False

    def __str__(self) -> str:
        prefix = "multivector of " if self.is_multivector else ""
        return f"{prefix}{self.size} numbers ({self.distance}, {self.datatype})"


@dataclass(frozen=True, slots=True)
class Layout:
    """The named vectors of a collection; `sparse` maps names to modifiers, such as `idf`."""

    vectors: Mapping[str, VectorConfig]
    sparse: Mapping[str, str | None]

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, Any]) -> "Layout":
        """Parse the parameters of a collection, as Qdrant writes them in JSON."""
        vectors = parameters.get("vectors") or {}
        if "size" in vectors:  # A single vector without a name.
            vectors = {"": vectors}
        sparse = parameters.get("sparse_vectors") or {}
        return cls(
            {
                name: VectorConfig(
                    config["size"],
                    config["distance"],
                    config.get("datatype") or "float32",
                    config.get("multivector_config") is not None,
                )
                for name, config in vectors.items()
            },
            {name: config.get("modifier") for name, config in sparse.items()},
        )

    @property
    def kinds(self) -> frozenset[str]:
        """The names of all its vectors."""
        return frozenset(self.vectors) | frozenset(self.sparse)

    @property
    def datatype(self) -> Datatype | None:
        """The number type of its dense and ColBERT vectors; None if it has neither."""
        types = [self.vectors[name].datatype for name in (DENSE, COLBERT) if name in self.vectors]
        return types[0] if types else None

    @property
    def max_colbert_vectors(self) -> int | None:
        """The maximum number of ColBERT vectors of a point; None without ColBERT."""
        if COLBERT not in self.vectors:
            return None
        return (MULTIVECTOR_NUMBERS - 1) // self.vectors[COLBERT].size


def make_layout(
    dense: int | None, colbert: int | None, *, sparse: bool, datatype: Datatype
) -> Layout:
    """Return the layout for vectors of these widths.

    bge-m3's sparse weights are learned, so IDF is not applied to them.
    """
    vectors = {}
    if dense is not None:
        vectors[DENSE] = VectorConfig(dense, datatype=datatype)
    if colbert is not None:
        vectors[COLBERT] = VectorConfig(colbert, datatype=datatype, is_multivector=True)
    return Layout(vectors, {SPARSE: None} if sparse else {})


def vector_options(
    kinds: Collection[str], datatype: Datatype, spaces: Sequence[str]
) -> EmbedOptions:
    """Return the options of a request for vectors of a collection, in its vector spaces."""
    return {
        "return_dense": DENSE in kinds,
        "return_sparse": SPARSE in kinds,
        "return_colbert": COLBERT in kinds,
        "output_dtype": datatype,
        "if_vector_space": spaces,
    }


def find_differences(required: Layout, found: Layout) -> Iterator[str]:
    """Yield the reasons why vectors of the required layout do not fit into a collection."""
    for name, config in required.vectors.items():
        existing = found.vectors.get(name)
        if existing is None:
            yield f"it has no vector {name}"
        elif existing != config:
            yield f"its vector {name} is {existing}, and {config} is needed"
    for name in required.sparse:
        if name not in found.sparse:
            yield f"it has no sparse vector {name}"
        elif found.sparse[name] is not None:
            yield f"its sparse vector {name} has the modifier {found.sparse[name]}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a collection's vectors, which is stored in its metadata.

    Attributes:
        vector_space: The id of the vector space of each kind.
        models: The names of the models, which are part of the ids of points.
    """

    vector_space: Mapping[str, str]
    models: Sequence[str]

    def ids_of(self, kinds: Collection[str]) -> list[str]:
        """Return the vector space ids of these kinds."""
        return sorted(space for kind, space in self.vector_space.items() if kind in kinds)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of a collection with this origin."""
        return {ORIGIN_KEY: asdict(self)}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any] | None) -> "Origin | None":
        """Parse the metadata of a collection; return None if they have no origin.

        Raises `QdrantError` if the origin has another shape.
        """
        origin = (metadata or {}).get(ORIGIN_KEY)
        if origin is None:
            return None
        try:
            return cls(dict(origin["vector_space"]), list(origin["models"]))
        except (KeyError, TypeError, ValueError) as error:
            detail = f"the collection's metadata under {ORIGIN_KEY} are not understood"
            raise QdrantError(detail) from error


@dataclass(frozen=True, slots=True, eq=False)
class TextVectors:
    """The vectors of one text: dense `[width]`, ColBERT `[vectors, width]`; or None."""

    dense: Array | None = None
    sparse: SparseVector | None = None
    colbert: Array | None = None

    @classmethod
    def of_response(cls, response: Embeddings, index: int) -> "TextVectors":
        """Return the vectors of one text of a response."""
        sparse = None if response.sparse is None else response.sparse[index]
        return cls(
            None if response.dense is None else response.dense[index],
            # A text of which the tokenizer knows nothing has no weights.
            sparse if sparse is not None and len(sparse.indices) else None,
            None if response.colbert is None else response.colbert[index],
        )

    @property
    def numbers(self) -> int:
        """The count of their numbers, including the token ids of sparse vectors."""
        sparse = 0 if self.sparse is None else 2 * len(self.sparse.indices)
        arrays = (self.dense, self.colbert)
        return sparse + sum(array.size for array in arrays if array is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A chunk with its vectors; a kind that was not requested is None."""

    id: str
    vectors: TextVectors
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hit:
    """A point that was found; only the last two stages return its payload."""

    id: str
    score: float
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Depths:
    """The number of points that each stage keeps: dense and sparse, their fusion, the last."""

    candidates: int
    fused: int
    limit: int


class Store(Protocol):
    """A collection in Qdrant; all methods raise `QdrantError`.

    Attributes:
        collection: Its name, or an alias of it.
        transport: The name of the transport, for messages.
        bytes_per_number: The bytes of a vector's number in a request, at most.
    """

    collection: str
    transport: str
    bytes_per_number: int

    def resolve_alias(self) -> None:
        """If `collection` is an alias, replace it by the name of the collection.

        An alias may be moved to vectors of another space while points are stored.
        """

    def layout(self) -> Layout | None:
        """Return the vectors of the collection; None if it does not exist."""

    def create(self, layout: Layout, origin: Origin) -> None:
        """Create the collection; `start_indexing` builds its HNSW graph."""

    def origin(self) -> Origin | None:
        """Return the origin of its vectors; None if it has none or does not exist."""

    def set_origin(self, origin: Origin) -> None:
        """Store the origin of the vectors."""

    def start_indexing(self) -> None:
        """Start to build the HNSW graph of the dense vectors, unless it exists."""

    def existing(self, ids: Sequence[str]) -> set[str]:
        """Return the ids of points that exist."""

    def upsert(self, points: Sequence[Point]) -> None:
        """Store points, and wait until they can be found."""

    def delete(self, ids: Sequence[str]) -> None:
        """Delete points."""

    def read(self, ids: Sequence[str], *, with_vectors: bool) -> list[Point]:
        """Return the points that exist."""

    def count(self, dataset: str | None) -> int:
        """Count the points of a data set, or all."""

    def page(self, dataset: str | None, offset: Any) -> tuple[list[str], Any]:
        """Return the ids of some points of a data set, or of all, and the next page's offset.

        The offset is None for the first page, and after the last one.
        """

    def search(self, query: TextVectors, depths: Depths) -> dict[str, list[Hit]]:
        """Return the points of each stage by descending score.

        The stages are `dense`, `sparse`, `fused` (their reciprocal rank fusion, or the only one of
        them) and `colbert`. Stages whose vectors the query lacks are left out.
        """

    def close(self) -> None:
        """Close connections and files."""


def iterate_pages(store: Store, dataset: str | None) -> Iterator[list[str]]:
    """Yield the ids of the points of a data set, or of all, page by page."""
    offset, is_first = None, True
    while is_first or offset is not None:
        ids, offset = store.page(dataset, offset)
        is_first = False
        yield ids


def to_lists(array: Array) -> Any:
    """Convert an array to lists, which Qdrant's clients require."""
    return np.asarray(array, np.float32).tolist()


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a collection.

    `address` is `http://host:6333`, or `edge:FOLDER` for Qdrant Edge. If a server does not answer
    gRPC, HTTP is used. A request fails after `timeout` seconds.
    """

    address: str
    collection: str
    api_key: str | None = None
    use_grpc: bool = True
    grpc_port: int = 6334
    timeout: int = 60


def read_vectors(named: Any) -> TextVectors:
    """Convert the vectors of a point from the types of Qdrant's clients."""
    if not isinstance(named, Mapping):
        return TextVectors()
    arrays = {
        name: np.asarray(named[name], np.float32) for name in (DENSE, COLBERT) if name in named
    }
    sparse = named.get(SPARSE)
    if sparse is not None:
        indices, values = np.asarray(sparse.indices), np.asarray(sparse.values)
        sparse = SparseVector(indices.astype(np.uint32), values.astype(np.float32))
    return TextVectors(arrays.get(DENSE), sparse, arrays.get(COLBERT))


def is_disk_full(reason: str) -> bool:
    """Whether an error message says that no disk space is left."""
    return any(phrase in reason.lower() for phrase in _DISK_FULL)


def named_vectors(
    vectors: TextVectors, make_sparse: Callable[[list[int], list[float]], Any]
) -> dict[str, Any]:
    """Convert vectors to the types of Qdrant's clients, by their names."""
    named: dict[str, Any] = {}
    if vectors.dense is not None:
        named[DENSE] = to_lists(vectors.dense)
    if vectors.sparse is not None:
        named[SPARSE] = make_sparse(vectors.sparse.indices.tolist(), vectors.sparse.values.tolist())
    if vectors.colbert is not None:
        named[COLBERT] = to_lists(vectors.colbert)
    return named
