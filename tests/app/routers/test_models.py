"""GET /v1/models, and commands of the operator that load and unload a model of MODELS."""

import pytest

from tests.smart_embedder.fakes import FakeModel, loaded
from tests.smart_embedder.further_models import FakeLoader, entries
from tests.support.in_process import served

OPERATOR = {"Authorization": "Bearer the-operators-token"}
SOMEBODY = {"Authorization": "Bearer somebodys-token"}
TOKENS = "operator:the-operators-token\nsomebody:somebodys-token\n"


@pytest.fixture
async def client(tmp_path):
    """A client of a service with the models `further` and `another`."""
    (tmp_path / "tokens").write_text(TOKENS)
    further = {"loader": FakeLoader(), "models": entries("further", "another")}
    further |= {"api_tokens_file": tmp_path / "tokens", "model_memory_threshold": 1.0}
    async with served(loaded(FakeModel(), 100), **further) as (_, client):
        client.headers |= SOMEBODY
        yield client


async def test_a_model_is_loaded_and_unloaded_by_command(client) -> None:
    for command, state in (("load", "ready"), ("load", "ready"), ("unload", "unloaded")):
        answer = await client.post(f"/v1/models/further/{command}", headers=OPERATOR)
        assert (answer.status_code, answer.json()["state"]) == (200, state)
        models = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
        assert models["further"] == answer.json()
        assert models["another"]["state"] == "unloaded"
        assert bool(answer.json()["token_budgets"]) == (state == "ready")
    assert 'embedder_model_requests{model="further"} 0.0' in (await client.get("/metrics")).text


@pytest.mark.parametrize("command", ["load", "unload"])
async def test_only_the_operator_may_send_commands_and_only_for_models_of_models(
    client, command
) -> None:
    path = f"/v1/models/further/{command}"
    refused = await client.post(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_operator")
    assert "operator" in refused.json()["error"]["message"]
    assert (await client.post(path, headers={"Authorization": ""})).status_code == 401
    default = (await client.get("/v1/models")).json()["data"][0]["id"]
    for name in (default, "nobodys"):
        answer = await client.post(f"/v1/models/{name}/{command}", headers=OPERATOR)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
