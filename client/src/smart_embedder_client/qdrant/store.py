"""A collection, whichever Qdrant has it: its vectors, what it is asked for, and its errors."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, Self

import numpy as np

from smart_embedder_client.answers import SparseVector
from smart_embedder_client.errors import VECTOR_SPACE_DIFFERS, SmartEmbedderError
from smart_embedder_client.safetensors import Array

_NO_SPACE = ("no space", "disk is full", "out of disk", "insufficient storage")
Datatype = Literal["float32", "float16", "uint8"]
DENSE, SPARSE, COLBERT = KINDS = ("dense", "sparse", "colbert")
COSINE = "Cosine"
# Qdrant's reciprocal rank fusion: with the constant 1 a text gets weight / place of each ranking.
# Dense vectors weigh 3 and sparse ones 1, so that a poor lexical ranking does not spoil a good one.
RRF_CONSTANT = 1
RRF_WEIGHTS: Mapping[str, float] = {DENSE: 3.0, SPARSE: 1.0}
# A multivector has fewer numbers than this.
MULTIVECTOR_NUMBERS = 1_048_576
# Edges of a node in Qdrant's HNSW graph, unless a collection says otherwise; 0 is no graph.
DEFAULT_EDGES = 16
# The keys of a point's payload.
TEXT, SOURCE, DATASET, MODEL, METADATA = "text", "source", "dataset", "model", "metadata"
# The keys of its metadata for a part of a page: the path of headings, the anchor at its beginning,
# and those within it, each behind its place in the text.
HEADINGS, ANCHOR, ANCHORS = "headings", "anchor", "anchors"
PAGE = 1_000
EDGE = "edge:"
# The key of a collection's metadata under which its `Origin` stands.
ORIGIN_KEY = "smart-embedder"


class QdrantError(Exception):
    """Qdrant cannot do what is asked, now or later."""


class QdrantRefusedError(QdrantError):
    """A point of the request is refused; the others may pass without it."""


class QdrantBusyError(QdrantError):
    """Qdrant cannot be reached or is busy: the same request may pass later.

    Attributes:
        retry_after: Seconds after which it may; None if Qdrant does not say.
    """

    def __init__(self, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class QdrantFullError(QdrantError):
    """Qdrant has no space left."""


class OtherSpaceError(QdrantError):
    """The service's vectors may not be mixed, or compared, with those of a collection."""


@contextmanager
def same_space(collection: str) -> Iterator[None]:
    """Raise the service's refusal to make vectors for a collection as `OtherSpaceError`."""
    try:
        yield
    except SmartEmbedderError as error:
        if error.code != VECTOR_SPACE_DIFFERS:
            raise
        detail = error.detail.rstrip(".")
        difference = detail.partition(" names: ")[2] or detail
        raise OtherSpaceError(
            f"the service's vectors are of another space than those of the collection {collection} "
            f"({difference}): {_ADVICE.format(collection)}"
        ) from error


_ADVICE = (
    "ask a service with the same model and settings, or embed the texts anew: "
    "smart-embedder ingest --from-collection {} --collection NEW"
)


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """One named vector of a collection.

    `edges` is the `m` of its HNSW graph; None is the collection's own.
    """

    size: int
    distance: str = COSINE
    datatype: Datatype = "float32"
    is_multivector: bool = False
    edges: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The named vectors of a collection; `sparse` has their modifiers, such as `idf`."""

    vectors: Mapping[str, VectorConfig]
    sparse: Mapping[str, str | None]

    @property
    def kinds(self) -> frozenset[str]:
        """The names of all vectors."""
        return frozenset(self.vectors) | frozenset(self.sparse)

    @property
    def datatype(self) -> Datatype | None:
        """Of the vectors that are not sparse; None if there are none of ours."""
        types = [self.vectors[name].datatype for name in (DENSE, COLBERT) if name in self.vectors]
        return types[0] if types else None

    @property
    def most_colbert_vectors(self) -> int | None:
        """How many ColBERT vectors one point may have; None without ColBERT."""
        if COLBERT not in self.vectors:
            return None
        return (MULTIVECTOR_NUMBERS - 1) // self.vectors[COLBERT].size


def make_layout(
    dense: int | None, colbert: int | None, *, sparse: bool, datatype: Datatype
) -> Layout:
    """A collection for vectors of these widths.

    ColBERT vectors only rescore, so no graph is made of them. bge-m3's sparse weights are learned,
    so they are not changed by IDF.
    """
    vectors = {}
    if dense is not None:
        vectors[DENSE] = VectorConfig(dense, datatype=datatype)
    if colbert is not None:
        vectors[COLBERT] = VectorConfig(colbert, datatype=datatype, is_multivector=True, edges=0)
    return Layout(vectors, {SPARSE: None} if sparse else {})


def differences(wanted: Layout, found: Layout) -> Iterator[str]:
    """What keeps the vectors of one layout out of a collection with another one."""
    for name, space in wanted.vectors.items():
        existing = found.vectors.get(name)
        if existing is None:
            yield f"it has no vector {name}"
        elif _facts(existing) != _facts(space):
            yield f"its vector {name} is {_facts(existing)}, and {_facts(space)} is needed"
    for name in wanted.sparse:
        if name not in found.sparse:
            yield f"it has no sparse vector {name}"
        elif found.sparse[name] is not None:
            yield f"its sparse vector {name} has the modifier {found.sparse[name]}"


def _facts(space: VectorConfig) -> str:
    several = "multivector of " if space.is_multivector else ""
    return f"{several}{space.size} numbers ({space.distance}, {space.datatype})"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the vectors of a collection come from, as it says itself.

    Attributes:
        vector_space: For each kind the id of the space that its vectors are in.
        models: The names of models that the ids of points follow from.
    """

    vector_space: Mapping[str, str]
    models: Sequence[str] = ()

    def ids_of(self, kinds: Collection[str]) -> list[str]:
        """The ids of the spaces of these kinds."""
        return sorted(space for kind, space in self.vector_space.items() if kind in kinds)

    @property
    def metadata(self) -> dict[str, Any]:
        """It as metadata of a collection."""
        return {ORIGIN_KEY: asdict(self)}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any] | None) -> "Origin | None":
        """What the metadata of a collection say about it; None if they say nothing.

        Raises `QdrantError` if they say something else.
        """
        told = (metadata or {}).get(ORIGIN_KEY)
        if told is None:
            return None
        if not isinstance(told, Mapping) or not isinstance(told.get("vector_space"), Mapping):
            raise QdrantError(f"the collection's metadata under {ORIGIN_KEY} are not understood")
        # Facts of another version are left out.
        names = {each.name for each in fields(cls)} & told.keys()
        return cls(**{name: told[name] for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """The vectors of one text: dense `[width]`, ColBERT `[vectors, width]`; None if left out."""

    dense: Array | None = None
    sparse: SparseVector | None = None
    colbert: Array | None = None

    @property
    def numbers(self) -> int:
        """How many there are, ids of sparse tokens included."""
        sparse = 0 if self.sparse is None else 2 * len(self.sparse.indices)
        return sparse + sum(each.size for each in (self.dense, self.colbert) if each is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One chunk, with its vectors, which are none where they were not asked for."""

    id: str
    vectors: Vectors
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hit:
    """A point that was found; its payload stands in the last two stages only."""

    id: str
    score: float
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Depths:
    """How many points each stage keeps: of dense and sparse, of their fusion, of the end."""

    candidates: int
    fused: int
    limit: int


class Store(Protocol):
    """A collection of a Qdrant; all methods raise `QdrantError`.

    Attributes:
        collection: Its name, or an alias of it.
        streams: How many requests it can work on at a time.
        transport: How vectors get there, as told to people.
        bytes_per_number: What a number of a vector takes on the way, at most.
    """

    collection: str
    streams: int
    transport: str
    bytes_per_number: int

    def beside(self, collection: str) -> Self:
        """Another collection of the same Qdrant, which need not exist."""

    def resolve(self) -> None:
        """From now on mean the collection itself, if `collection` is an alias.

        An alias may be moved to vectors of another space while points are stored.
        """

    def layout(self) -> Layout | None:
        """The vectors of the collection; None if it does not exist."""

    def create(self, layout: Layout, origin: Origin | None) -> None:
        """Make the collection; its HNSW graph is not made before `start_indexing`."""

    def origin(self) -> Origin | None:
        """Where its vectors come from; None if it does not say or does not exist."""

    def note_origin(self, origin: Origin) -> None:
        """Have the collection say where its vectors come from, if this Qdrant can keep it."""

    def start_indexing(self) -> None:
        """Have the HNSW graph of the dense vectors made, unless there is one."""

    def existing(self, ids: Sequence[str]) -> set[str]:
        """Those of the points that the collection has."""

    def upsert(self, points: Sequence[Point]) -> None:
        """Store points; it returns when they can be found."""

    def delete(self, ids: Sequence[str]) -> None:
        """Remove points."""

    def read(self, ids: Sequence[str], *, with_vectors: bool) -> list[Point]:
        """Those of the points that the collection has."""

    def sample(self, count: int) -> list[Point]:
        """So many points by chance, or all; without vectors."""

    def count(self, dataset: str | None) -> int:
        """How many points a data set has, or all together."""

    def page(self, dataset: str | None, offset: Any) -> tuple[list[str], Any]:
        """Ids of the points of a data set, or of all, and where those after them begin.

        `offset` None is the beginning, and where there are no more.
        """

    def search(self, query: Vectors, depths: Depths) -> dict[str, list[Hit]]:
        """The points of each stage by falling score.

        The stages are `dense` and `sparse`, `fused` (their reciprocal rank fusion, or the only one
        of them), and `colbert`; each stands there if the query has its vectors.
        """

    def close(self) -> None:
        """Let go of connections and files."""


def pages(store: Store, dataset: str | None) -> Iterator[list[str]]:
    """The ids of the points of a data set, or of all."""
    offset, is_first = None, True
    while is_first or offset is not None:
        ids, offset = store.page(dataset, offset)
        is_first = False
        yield ids


def as_lists(array: Array) -> Any:
    """The numbers as Qdrant's clients take them."""
    return np.asarray(array, np.float32).tolist()


@dataclass(frozen=True, slots=True)
class Target:
    """Where a collection is.

    `address` is `http://host:6333`, a folder of Qdrant's engine in Python, `:memory:`, or
    `edge:FOLDER` for Qdrant Edge. A server that answers no gRPC is asked by HTTP. After `timeout`
    seconds a request has failed.
    """

    address: str
    collection: str
    api_key: str | None = None
    use_grpc: bool = True
    grpc_port: int = 6334
    timeout: int = 60


def open_store(target: Target) -> Store:
    """Connect to a collection, which need not exist.

    Raises:
        QdrantError: Nothing answers, or another process has the folder open.
        ImportError: Of the package that the address needs.
    """
    # Each of the two packages is needed for its own addresses alone.
    if target.address.startswith(EDGE):
        from smart_embedder_client.qdrant.edge_store import EdgeStore  # noqa: PLC0415

        return EdgeStore(target.address.removeprefix(EDGE), target.collection)
    from smart_embedder_client.qdrant.client_store import ClientStore  # noqa: PLC0415

    return ClientStore(target)


def check_model(store: Store, served: str) -> None:
    """Raise `OtherSpaceError` if a point says that its vectors are of another model."""
    for point in store.sample(1):
        if (model := point.payload.get(MODEL, served)) != served:
            raise OtherSpaceError(
                f"the collection {store.collection} has vectors of {model}, and the service makes "
                f"those of {served}: {_ADVICE.format(store.collection)}"
            )


def read_vectors(named: Any) -> Vectors:
    """Our vectors of a point, as Qdrant's clients give them."""
    if not isinstance(named, Mapping):
        return Vectors()
    arrays = {
        name: np.asarray(named[name], np.float32) for name in (DENSE, COLBERT) if name in named
    }
    sparse = named.get(SPARSE)
    if sparse is not None:
        indices, values = np.asarray(sparse.indices), np.asarray(sparse.values)
        sparse = SparseVector(indices.astype(np.uint32), values.astype(np.float32))
    return Vectors(arrays.get(DENSE), sparse, arrays.get(COLBERT))


def says_full(reason: str) -> bool:
    """Whether a reason is that there is no space left."""
    return any(each in reason.lower() for each in _NO_SPACE)


def named_vectors(
    vectors: Vectors, make_sparse: Callable[[list[int], list[float]], Any]
) -> dict[str, Any]:
    """The vectors that there are, by their names, as Qdrant's clients take them."""
    named: dict[str, Any] = {}
    if vectors.dense is not None:
        named[DENSE] = as_lists(vectors.dense)
    if vectors.sparse is not None:
        named[SPARSE] = make_sparse(vectors.sparse.indices.tolist(), vectors.sparse.values.tolist())
    if vectors.colbert is not None:
        named[COLBERT] = as_lists(vectors.colbert)
    return named
