"""The variables of the compose files are listed, with the defaults that they have there."""

import re
from pathlib import Path

import pytest

from smart_embedder.settings.sources import COMPOSE_VARIABLES
from tests.support.env_example import listed_for_others, listed_settings

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?")
# Compose's own, and one that Qdrant reads.
OF_OTHERS = {
    "COMPOSE_FILE": "",
    "COMPOSE_PROFILES": "",
    "COMPOSE_PROJECT_NAME": "smart-embedder",
    "QDRANT__SERVICE__API_KEY": "",
}


@pytest.mark.parametrize("name", ["docker-compose.gpu.yml", "docker-compose.cpu.yml"])
def test_what_compose_reads_is_listed_with_the_default_it_has_there(name: str) -> None:
    text = (ROOT / name).read_text()
    found = dict(VARIABLE.findall(text))
    found.pop("API_TOKENS_FILE")  # Without one the service gets another.
    assert found.items() <= (listed_settings() | listed_for_others()).items()
    assert OF_OTHERS | found == found | listed_for_others()
    assert f"name: {OF_OTHERS['COMPOSE_PROJECT_NAME']}\n" in text


def test_each_has_a_description_and_none_is_a_setting() -> None:
    assert all(each.description for each in COMPOSE_VARIABLES)
    assert not set(listed_for_others()) & set(listed_settings())
