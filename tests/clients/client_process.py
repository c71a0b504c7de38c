"""The examples of docs/other-clients.md, and a process in the clients' environment for them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.answering_process import AnsweringProcess, answering_process

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ENVIRONMENT = REPOSITORY / ".venv-clients"
PAGE = (REPOSITORY / "docs" / "other-clients.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
_EXAMPLE = re.compile(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?```(python|js)\n(.*?)```", re.MULTILINE | re.DOTALL
)
_COMMANDS = {
    "python": [str(ENVIRONMENT / "bin" / "python"), str(HERE / "run_client.py")],
    "sie": [str(ENVIRONMENT / "sie" / "bin" / "python"), str(HERE / "run_client.py")],
    "js": ["node", str(HERE / "run_client.mjs"), str(ENVIRONMENT / "node")],
}

# The tables of tiktoken that a package carries.
TIKTOKEN_FILES = next(ENVIRONMENT.glob("lib/*/site-packages/litellm/*/tokenizers"), ENVIRONMENT)
# No telemetry, no downloads.
_ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "TIKTOKEN_CACHE_DIR": str(TIKTOKEN_FILES),
}


@dataclass(frozen=True, slots=True)
class Example:
    """Code of the page, in `python`, in `sie` (a newer Python with SIE's client), or in `js`."""

    language: str
    code: str


EXAMPLES = {
    name: Example("sie" if "sie_sdk" in code else language, code)
    for name, language, code in _EXAMPLE.findall(PAGE)
}


class ClientProcess:
    """Runs an example repeatedly, against any server."""

    def __init__(self, example: Example, process: AnsweringProcess) -> None:
        self._code = example.code
        self._process = process

    def run(self, url: str, texts: list, *replaced: tuple[str, str]) -> dict:
        """Return the result of the example at `url`, or its error; `replaced` edits the code."""
        self.start(url, texts, *replaced)
        return self.result()

    def start(self, url: str, texts: list, *replaced: tuple[str, str]) -> None:
        """Start a run; `result` waits for its end."""
        code = self._code
        for old, new in replaced:
            assert old in code, f"{old} is not in the example"
            code = code.replace(old, new)
        self._process.send(code=code.replace(ADDRESS, url), texts=texts)

    def result(self) -> dict:
        found: dict = self._process.answer()
        return found


@contextmanager
def client_process(example: Example) -> Iterator[ClientProcess]:
    """Start a process for one example; end it when the block ends."""
    with answering_process(_COMMANDS[example.language], **_ALONE) as process:
        yield ClientProcess(example, process)
