"""Advice for the names of other servers' settings."""

from itertools import chain

import pytest

from app.settings import Settings, unknown_names
from smart_embedder.other_servers import NAMES, advice
from smart_embedder.settings import LIBRARY_VARIABLES
from tests.support.no_settings import empty_environment  # noqa: F401 - used by each test


def test_each_name_maps_to_our_settings_and_is_not_one_itself() -> None:
    assert not NAMES.keys() & Settings.model_fields.keys()
    libraries = {name.lower() for name in LIBRARY_VARIABLES}
    settings = [found for found in NAMES.values() if isinstance(found, tuple)]
    assert {*chain.from_iterable(settings)} <= Settings.model_fields.keys() | libraries


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # text-embeddings-inference and embedding-server
        ("--model-id", "here it is embedding_model or reranker_model"),
        ("--hostname", "here it is host"),
        ("HF_API_TOKEN", "here it is hf_token"),
        ("--auto-truncate", "texts are cut and reported, unless a request has truncate=false"),
        # infinity
        ("INFINITY_MODEL_ID", "here it is embedding_model or reranker_model"),
        ("--engine", "there is one engine"),
        # vLLM
        ("--model", "here it is embedding_model or reranker_model"),
        ("--max-queu-size", None),
    ],
)
def test_advice_for_a_setting_of_another_server(name: str, expected: str | None) -> None:
    assert advice(name, str.lower, Settings.model_fields) == expected


def test_a_variable_of_another_server_gives_a_warning() -> None:
    known = {
        "API_KEY": "API_TOKEN",
        "INFINITY_BATCH_SIZE": "MAX_BATCH_SEQUENCES",
        "MODEL": "EMBEDDING_MODEL or RERANKER_MODEL",
        "MODEL_ID": "EMBEDDING_MODEL or RERANKER_MODEL",
        "SIE_DEVICE": "DEVICE",
    }
    # Variables of systems and other programs, without a setting here, or of clients of SIE.
    others = ["HOSTNAME", "BATCH_SIZE", "COMPILE", "AUTO_TRUNCATE", "SIE_BASE_URL"]
    assert dict(unknown_names(dict.fromkeys([*known, *others], "x"))) == known
