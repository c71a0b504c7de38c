"""A TypeScript client generated from /openapi.json compiles and works."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import AUTHORIZED, TOKEN
from tests.support.server import REPOSITORY
from tests.support.waiting import LIMIT

MODULES = REPOSITORY / ".venv-generated" / "node_modules"
SOURCES = Path(__file__).parent / "generated"

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not MODULES.is_dir(),
    reason="needs Node.js and scripts/check_generated_clients.sh --install",
)


def node(folder: Path, *command: str) -> str:
    done = subprocess.run(
        ["node", *command], cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generated_typescript_client_embeds_and_reranks(clients_server, tmp_path: Path) -> None:
    for name in ("client.ts", "tsconfig.json", "package.json"):
        shutil.copy(SOURCES / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    with clients_server.client(headers=AUTHORIZED) as native:
        (tmp_path / "openapi.json").write_text(native.get("/openapi.json").text)
        texts = ["hybrid search", "bread"]
        embedded = native.post("/embeddings/", json={"sentences": texts}).json()
        ranked = native.post("/rerank", json={"query": "search", "passages": texts}).json()
    generate = ("node_modules/openapi-typescript/bin/cli.js", "openapi.json", "-o", "schema.d.ts")
    # A field of a request with a default may be left out.
    node(tmp_path, *generate, "--default-non-nullable=false")
    node(tmp_path, "node_modules/typescript/bin/tsc", "-p", ".")
    answer = json.loads(node(tmp_path, "client.js", clients_server.url, TOKEN))
    assert answer["dense"] == [item["embeddings"]["dense"] for item in embedded["data"]]
    assert answer["scores"] == [[result["index"], result["score"]] for result in ranked["results"]]
    assert answer["code"] == "empty_input"
