"""Sizes and copies of embeddings, joined sequences, and the text of a download."""

import numpy as np
import pytest

from smart_embedder.interface import Download, human_size
from smart_embedder.results import SparseVector, TextEmbedding, copy_embeddings
from smart_embedder.tokens import JoinedIds, TokenCount, TokenizedPair, join

IDS = np.arange(5)


def test_copies_of_embeddings_share_no_memory_with_a_batch() -> None:
    batch = np.arange(60, dtype=np.float32)
    sparse = SparseVector(np.arange(3), batch[5:8])
    whole = TextEmbedding(batch[:8], sparse, batch[8:20].reshape(3, 4))
    assert whole.nbytes == 8 * 4 + 3 * (8 + 4) + 12 * 4
    assert TextEmbedding(sparse=sparse).nbytes == 36
    copy, shorter = copy_embeddings([whole, TextEmbedding(dense=batch[4:9])])
    pairs = [(copy.dense, whole.dense), (copy.colbert, whole.colbert)]
    pairs += [(copy.sparse.indices, sparse.indices), (copy.sparse.values, sparse.values)]
    pairs += [(shorter.dense, batch[4:9])]
    for copied, original in pairs:
        np.testing.assert_array_equal(copied, original)
        assert not np.shares_memory(copied, original)
    assert shorter.sparse is shorter.colbert is None
    assert copy_embeddings([]) == []
    assert TextEmbedding().nbytes == 0


def test_joined_ids_are_read_as_one_sequence() -> None:
    joined = JoinedIds(IDS, IDS[:2])
    assert len(joined) == 7
    assert join(joined).tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert join(IDS) is IDS
    pair = TokenizedPair(joined, TokenCount(3, 3), TokenCount(4, 4))
    assert pair.ids.tolist() == join(joined).tolist()


@pytest.mark.parametrize(
    ("done", "total", "expected"),
    [
        (999_999_999, 10**9, "1000 MB of 1.0 GB (99 %)"),
        (1_500_000, 2_300_000_000, "2 MB of 2.3 GB (0 %)"),
    ],
)
def test_the_text_of_a_download(done: int, total: int, expected: str) -> None:
    assert str(Download("m3", done, total)) == f"m3 is being downloaded: {expected}"
    assert human_size(done) == expected.partition(" of ")[0]
