"""What clients send is answered with the native numbers.

`recorded.jsonl` holds what the real clients sent when `scripts/check_clients.sh --record` ran them,
and `written.jsonl` what applications send that cannot be installed, after their public sources.
"""

import json

import numpy as np
import pytest

from tests.clients.conftest import TOKEN
from tests.clients.expected import check_scores, decode_vector, embed_natively, rerank_natively
from tests.clients.recorder import RECORDED, as_bytes, read_requests
from tests.support.formats import MESSAGE_PACK, from_message_pack
from tests.support.server import RunningServer

REQUESTS = read_requests(RECORDED) | read_requests(RECORDED.with_name("written.jsonl"))


@pytest.mark.parametrize("recorded", REQUESTS.values(), ids=list(REQUESTS))
def test_recorded_request_gets_the_native_numbers(
    recorded: dict, clients_server: RunningServer, native
) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"} | recorded["headers"]
    with clients_server.client() as client:
        client.headers.clear()
        response = client.request(
            recorded["method"], recorded["path"], content=as_bytes(recorded), headers=headers
        )
    assert response.status_code == 200, response.text
    if headers.get("content-type") == MESSAGE_PACK:
        check_sie(
            from_message_pack(as_bytes(recorded)), from_message_pack(response.content), native
        )
        return
    sent, answer = json.loads(recorded["body"]), response.json()
    if "inputs" in sent:
        assert np.float32(answer).tobytes() == embed_natively(native, sent["inputs"]).tobytes()
    elif "query" in sent and "texts" in sent:
        found = [(sent["texts"][item["index"]], item["score"]) for item in answer]
        check_scores(found, rerank_natively(native, sent["query"], sent["texts"]))
    elif "texts" in sent:
        found = answer["embeddings"]
        # Without embedding_types it is a list.
        found = np.float32(found["float"] if sent.get("embedding_types") else found)
        assert found.tobytes() == embed_natively(native, sent["texts"]).tobytes()
    elif "documents" in sent:
        found = [
            (sent["documents"][item["index"]], item["relevance_score"])
            for item in answer["results"]
        ]
        check_scores(found, rerank_natively(native, sent["query"], sent["documents"]))
    elif "prompt" in sent or "embeddings" in answer:  # Ollama's.
        texts = [sent["prompt"]] if "prompt" in sent else sent["input"]
        found = np.float32(answer.get("embeddings") or [answer["embedding"]])
        assert found.tobytes() == embed_natively(native, texts).tobytes()
    else:
        texts = [sent["input"]] if isinstance(sent["input"], str) else sent["input"]
        vectors = np.stack([decode_vector(item["embedding"]) for item in answer["data"]])
        assert vectors.tobytes() == embed_natively(native, texts).tobytes()
        is_base64 = sent.get("encoding_format") == "base64"
        assert all(isinstance(item["embedding"], str) == is_base64 for item in answer["data"])


def check_sie(sent: dict, answer: dict, native) -> None:
    texts = [item["text"] for item in sent["items"]]
    if "query" not in sent:
        vectors = np.stack([item["dense"]["values"] for item in answer["items"]])
        assert vectors.tobytes() == embed_natively(native, texts).tobytes()
        return
    named = {item.get("id", f"item-{i}"): item["text"] for i, item in enumerate(sent["items"])}
    found = [(named[entry["item_id"]], entry["score"]) for entry in answer["scores"]]
    check_scores(found, rerank_natively(native, sent["query"]["text"], texts))
