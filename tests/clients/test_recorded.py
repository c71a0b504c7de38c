"""What clients send is answered with the native numbers.

`recorded` holds what the real clients sent when `scripts/check_clients.sh --record` ran them, and
`written` what applications send that cannot be installed, after their public sources.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.clients.conftest import TOKEN
from tests.clients.expected import assert_same_scores, scores_of, vector_of, vectors_of
from tests.support.server import RunningServer

REQUESTS = [
    path for of in ("recorded", "written") for path in (Path(__file__).parent / of).glob("*.json")
]


@pytest.mark.parametrize("path", sorted(REQUESTS), ids=lambda path: path.stem)
def test_a_request_is_answered_with_the_native_numbers(
    path: Path, clients_server: RunningServer, native
) -> None:
    request = json.loads(path.read_text())
    headers = {"authorization": f"Bearer {TOKEN}"} | request["headers"]
    with clients_server.client() as client:
        client.headers.clear()
        response = client.request(
            request["method"], request["path"], content=request["body"], headers=headers
        )
    assert response.status_code == 200, response.text
    sent, answer = json.loads(request["body"]), response.json()
    if "source_sentence" in sent.get("inputs", ()):
        texts = sent["inputs"]["sentences"]
        source, *others = vectors_of(native, [sent["inputs"]["source_sentence"], *texts])
        np.testing.assert_allclose(answer, np.stack(others) @ source, rtol=0, atol=1e-6)
    elif "inputs" in sent:
        assert np.float32(answer).tobytes() == vectors_of(native, sent["inputs"]).tobytes()
    elif "query" in sent and "texts" in sent:
        found = [(sent["texts"][item["index"]], item["score"]) for item in answer]
        assert_same_scores(found, scores_of(native, sent["query"], sent["texts"]))
    elif "texts" in sent:
        found = answer["embeddings"]
        # Where no types are asked for, it is a list.
        found = np.float32(found["float"] if sent.get("embedding_types") else found)
        assert found.tobytes() == vectors_of(native, sent["texts"]).tobytes()
    elif "documents" in sent:
        found = [
            (sent["documents"][item["index"]], item["relevance_score"])
            for item in answer["results"]
        ]
        assert_same_scores(found, scores_of(native, sent["query"], sent["documents"]))
    else:
        texts = [sent["input"]] if isinstance(sent["input"], str) else sent["input"]
        vectors = np.stack([vector_of(item["embedding"]) for item in answer["data"]])
        assert vectors.tobytes() == vectors_of(native, texts).tobytes()
        is_base64 = sent.get("encoding_format") == "base64"
        assert all(isinstance(item["embedding"], str) == is_base64 for item in answer["data"])
