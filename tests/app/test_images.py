"""Pictures in requests: data URLs, their errors, and the answers about them."""

from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from app.images import read_image
from smart_embedder.errors import InvalidRequestError
from tests.app.conftest import answered, serving
from tests.support.pictures import POSITIONS, data_url, draw_picture, save_image_text, save_picture

URL = data_url(save_picture(draw_picture(50, 40)))
OTHER = data_url(save_picture(draw_picture(40, 50, seed=1), "JPEG"), "image/jpeg")


@pytest.fixture(scope="module")
def images_client(tmp_path_factory) -> Iterator[TestClient]:
    """A client of a service with a model that reads pictures."""
    folder = save_image_text(tmp_path_factory.mktemp("models") / "clip", "clip")
    with serving(embedding_model=str(folder)) as client:
        yield client


def test_pictures_and_texts_are_embedded_in_the_order_of_the_request(images_client) -> None:
    sentences = ["hybrid search", {"image": URL}, "vector " * 60, {"image": OTHER}]
    answer = answered(images_client, "/embeddings/", sentences=sentences)
    assert [item["text"] for item in answer["data"]] == [sentences[0], None, sentences[2], None]
    assert answer["usage"]["prompt_tokens"] == 6 + 17 + POSITIONS + 17
    assert [warning["target"]["pointer"] for warning in answer["warnings"]] == ["/sentences/2"]
    for index, sentence in enumerate(sentences):
        alone = answered(images_client, "/embeddings/", sentences=[sentence])["data"][0]
        dense = answer["data"][index]["embeddings"]["dense"]
        assert alone["embeddings"]["dense"] == pytest.approx(dense, abs=1e-5)


def test_the_models_that_read_pictures_are_listed(images_client, client) -> None:
    for served, reads in ((images_client, True), (client, False)):
        (model, *_) = served.get("/health").json()["served_models"]
        assert model["makes"]["reads_images"] is reads


def test_late_interaction_ranks_pictures(images_client) -> None:
    passages = [{"image": URL}, "river", {"image": OTHER}]
    answer = answered(images_client, "/rerank", query="hybrid search", passages=passages)
    found = {item["index"]: item["passage"] for item in answer["results"]}
    assert found == {0: None, 1: "river", 2: None}
    items = ["hybrid search", *passages]
    options = {"sentences": items, "normalize_dense": True}
    answered_vectors = answered(images_client, "/embeddings/", **options)["data"]
    query, *vectors = (item["embeddings"]["dense"] for item in answered_vectors)
    for item in answer["results"]:
        score = sum(a * b for a, b in zip(query, vectors[item["index"]], strict=True))
        assert item["score"] == pytest.approx(score, abs=1e-5)


def test_openais_and_coheres_paths_take_pictures(images_client) -> None:
    vectors = answered(images_client, "/embeddings/", sentences=["river", {"image": URL}])["data"]
    texts, pictures = (
        np.array(item["embeddings"]["dense"]) / np.linalg.norm(item["embeddings"]["dense"])
        for item in vectors
    )
    # Jina's clients send base64 without a type.
    sent = ["river", {"image": URL}, {"image": URL.partition(",")[2]}]
    rows = answered(images_client, "/v1/embeddings", input=sent)["data"]
    for row, expected in zip(rows, (texts, pictures, pictures), strict=True):
        assert row["embedding"] == pytest.approx(expected, abs=1e-5)
    content = {"type": "image_url", "image_url": {"url": URL}}
    for body in ({"images": [URL], "input_type": "image"}, {"inputs": [{"content": [content]}]}):
        answer = answered(images_client, "/v2/embed", **body)
        assert answer["embeddings"]["float"][0] == pytest.approx(pictures, abs=1e-5)
        assert answer["texts"] == []
    documents = ["river", {"image": URL}]
    body = {"query": "river", "documents": documents, "return_documents": True}
    results = answered(images_client, "/v2/rerank", **body)["results"]
    assert [item["document"] for item in results] == [{"text": "river"}, {"text": None}]


def test_coheres_input_type_of_images_needs_images(images_client) -> None:
    response = images_client.post("/v2/embed", json={"texts": ["a"], "input_type": "image"})
    assert response.status_code == 400
    assert "input_type may be image for images alone" in response.json()["message"]


def test_coheres_errors_name_the_field_that_was_sent(images_client) -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    for body, message in (
        ({"images": ["https://example.com/a.png"]}, "the image at /images/0 must be a data URL"),
        ({"inputs": [{"content": content}]}, "the image at /inputs/0 must be a data URL"),
        ({"images": [URL] * 2000}, "the list images holds 2000"),
        ({"images": [5]}, "each item of the field images must be a data URL"),
    ):
        response = images_client.post("/v2/embed", json=body)
        assert response.status_code == 400
        assert message in response.json()["message"].replace("The ", "the ")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"image": "https://example.com/a.png"}, "/sentences/1 must be a data URL: no address is"),
        ({"image": "data:image/svg+xml;base64,AAAA"}, "must be in base64, of one of image/png, im"),
        ({"image": "data:image/png,AAAA"}, "/sentences/1 must be in base64, of one of image/png"),
        ({"image": "data:image/png;base64,AAAA"}, "at index 1: the picture is none of PNG, JPEG"),
        ({"picture": URL}, "sentences[1] is an object with 1 fields: send a string, or {"),
        ({"image": URL, "text": "a"}, "sentences[1] is an object with 2 fields: send a string"),
        ({"image": None}, "sentences[1] is an object with 1 fields: send a string"),
    ],
)
def test_an_unusable_picture_is_422_in_one_sentence(images_client, image, message) -> None:
    response = images_client.post("/embeddings/", json={"sentences": ["a", image]})
    assert response.status_code == 422
    assert message in response.json()["detail"]


def test_a_picture_that_needs_more_memory_than_its_request_may_use_is_422(images_client) -> None:
    body = {"sentences": [{"image": data_url(save_picture(Image.new("1", (4000, 3000))))}]}
    response = images_client.post("/embeddings/", json=body)
    assert response.status_code == 422
    detail = response.json()["detail"]
    assert "a picture of 4000 x 3000 pixels and those before it need 60000000 bytes" in detail


def test_a_model_for_texts_alone_answers_422(client) -> None:
    body = {"sentences": ["text", {"image": URL}]}
    response = client.post("/embeddings/", json=body)
    assert response.status_code == 422
    assert "reads no pictures: send texts" in response.json()["detail"]
    ranked = client.post("/rerank", json={"query": "a", "passages": [{"image": URL}]})
    assert "reads no pictures" in ranked.json()["detail"]


def test_a_prompt_needs_a_text(images_client) -> None:
    body = {"sentences": [{"image": URL}], "prompt": "search: "}
    response = images_client.post("/embeddings/", json=body)
    assert response.status_code == 422
    assert "option prompt has no effect on pictures" in response.json()["detail"]
    answered(images_client, "/embeddings/", **body | {"sentences": ["river", {"image": URL}]})


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "IMAGE/JPG", "image/webp"])
def test_data_urls_of_known_types_are_read(kind) -> None:
    content = save_picture(draw_picture(4, 4))
    url = data_url(content, kind)
    for known in (url, url.replace("data:", "DATA:")):
        assert read_image(known, "/input/0").read() == content


def test_a_data_url_without_base64_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_image("data:image/png;utf8,<a>", "/input/0")
    assert refused.value.problems[0]["pointer"] == "/input/0"
