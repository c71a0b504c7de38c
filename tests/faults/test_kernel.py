"""A kernel that is wrong on the user's machine is found at the start and not used."""

import numpy as np
import pytest
import torch

from smart_embedder.models.ops.choose import choose_backend
from tests.faults.tally import EMBED
from tests.support.native import LIBRARIES

pytestmark = pytest.mark.skipif(
    not LIBRARIES, reason="without the kernels a linear layer has one path and none to fall back to"
)


@pytest.mark.parametrize(
    ("kernel", "reason"), [("wrong", "differs by"), ("raise", "raises RuntimeError")]
)
def test_the_plain_path_serves_instead(faulty_server, server, kernel: str, reason: str) -> None:
    with faulty_server(KERNEL=kernel, DTYPE="float32") as faulty:
        with faulty.client() as client:
            health = client.get("/health")
            (model, *_) = health.json()["models"]
            answer = client.post(EMBED[0], json=EMBED[1]).json()
        assert faulty.stop() == 0
    fastest = choose_backend(torch.device("cpu"), torch.float32)
    first, next_one, *_ = fastest.table["linear"]
    assert model["paths"]["linear"] == next_one
    (refused,) = model["refused"]
    assert (refused["operation"], refused["path"]) == ("linear", first)
    assert reason in refused["reason"]
    assert "/" not in refused["reason"]
    assert faulty.log.count("path_refused") == 1
    assert f"used_instead={next_one}" in faulty.log
    with server.client() as client:
        expected = client.post(EMBED[0], json=EMBED[1]).json()
    vectors = (each["data"][0]["embeddings"]["dense"] for each in (answer, expected))
    np.testing.assert_allclose(*vectors, atol=1e-5)
