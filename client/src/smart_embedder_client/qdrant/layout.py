"""Which vectors a collection has, and whether those of the service fit into it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Datatype = Literal["float32", "float16", "uint8"]

DENSE, SPARSE, COLBERT = "dense", "sparse", "colbert"
COSINE = "Cosine"
# A multivector has fewer numbers than this.
MULTIVECTOR_NUMBERS = 1_048_576
# Edges of a node in Qdrant's HNSW graph, unless a collection says otherwise; 0 is no graph.
DEFAULT_EDGES = 16


@dataclass(frozen=True, slots=True)
class VectorSpace:
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

    vectors: Mapping[str, VectorSpace]
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
        vectors[DENSE] = VectorSpace(dense, datatype=datatype)
    if colbert is not None:
        vectors[COLBERT] = VectorSpace(colbert, datatype=datatype, is_multivector=True, edges=0)
    return Layout(vectors, {SPARSE: None} if sparse else {})


def differences(wanted: Layout, found: Layout) -> list[str]:
    """What keeps the vectors of one layout out of a collection with another one."""
    return [*_dense_differences(wanted, found), *_sparse_differences(wanted, found)]


def _dense_differences(wanted: Layout, found: Layout) -> Iterator[str]:
    for name, space in wanted.vectors.items():
        existing = found.vectors.get(name)
        if existing is None:
            yield f"it has no vector {name}"
        elif _facts(existing) != _facts(space):
            yield f"its vector {name} is {_facts(existing)}, and {_facts(space)} is needed"


def _facts(space: VectorSpace) -> str:
    several = "multivector of " if space.is_multivector else ""
    return f"{several}{space.size} numbers ({space.distance}, {space.datatype})"


def _sparse_differences(wanted: Layout, found: Layout) -> Iterator[str]:
    for name in wanted.sparse:
        if name not in found.sparse:
            yield f"it has no sparse vector {name}"
        elif found.sparse[name] is not None:
            yield f"its sparse vector {name} has the modifier {found.sparse[name]}"
