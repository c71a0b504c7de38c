"""Compare the results of a client with those of the native endpoints."""

import base64

import httpx2
import numpy as np

# The limit of the test server; OpenAI's paths take more.
MOST_TEXTS = 400
DENSE = {"return_sparse": False, "return_colbert": False}


def embed_natively(client: httpx2.Client, texts: list[str]) -> np.ndarray:
    """Return float32 `[texts, width]`, from several requests if needed."""
    vectors = []
    for begin in range(0, len(texts), MOST_TEXTS):
        body = {"sentences": texts[begin : begin + MOST_TEXTS]}
        answer = client.post("/embeddings/", json=body | DENSE)
        assert answer.status_code == 200, answer.text
        vectors += [item["embeddings"]["dense"] for item in answer.json()["data"]]
    return np.float32(vectors)


def rerank_natively(client: httpx2.Client, query: str, texts: list[str]) -> list[tuple[str, float]]:
    """Return passages and probabilities by descending score."""
    body = {"query": query, "passages": texts, "normalize": True}
    answer = client.post("/rerank", json=body)
    assert answer.status_code == 200, answer.text
    return [(item["passage"], item["score"]) for item in answer.json()["results"]]


def check_scores(found: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [text for text, _ in found] == [text for text, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in found], [score for _, score in expected], rtol=0, atol=1e-6
    )


def decode_vector(embedding: str | list[float]) -> np.ndarray:
    """Decode a vector, which may be base64, as float32."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), dtype="<f4")
    return np.float32(embedding)


def check_numbers(
    found: dict, client: httpx2.Client, texts: list[str], batch: int | None = None
) -> None:
    """Check that a client, which sends `batch` texts per request, got the native numbers."""
    if "vectors" in found:
        size = batch or len(texts)
        batches = [texts[i : i + size] for i in range(0, len(texts), size)]
        expected = np.concatenate([embed_natively(client, batch) for batch in batches])
        vectors = np.stack([decode_vector(vector) for vector in found["vectors"]])
        assert vectors.tobytes() == expected.tobytes()
    else:
        assert "scores" in found, found
        check_scores(found["scores"], rerank_natively(client, texts[0], texts))
