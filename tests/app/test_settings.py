"""The sources of settings: flags, the environment and .env, which may hold no unknown name."""

import os
import re
from pathlib import Path

import pytest

from app import settings as service
from app.settings import (
    Settings,
    load_settings,
    meaning,
    unknown_names,
    without_markup,
)
from scripts.settings_docs import COMPOSE_VARIABLES, LIBRARY_VARIABLES
from smart_embedder import settings as engine
from smart_embedder.errors import StartupError
from tests.support.env_example import listed_for_others, listed_settings
from tests.support.no_settings import empty_environment  # noqa: F401 - used by each test
from tests.support.script import run_script
from tests.support.server import REPOSITORY

VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?")
# Those of compose, and one of Qdrant.
OF_OTHERS = {
    "COMPOSE_FILE": "",
    "COMPOSE_PROFILES": "",
    "COMPOSE_PROJECT_NAME": "smart-embedder",
    "QDRANT__SERVICE__API_KEY": "",
}


def test_a_flag_wins_over_the_environment_which_wins_over_dotenv(monkeypatch, tmp_path) -> None:
    (tmp_path / ".env").write_text("PORT=9000\nDTYPE=float32\nMAX_QUEUE_SIZE=7\n")
    monkeypatch.setenv("PORT", "9001")
    monkeypatch.setenv("DTYPE", "bfloat16")
    settings = load_settings(["--port", "9002", "--rerank-max-queue=3"])
    assert (settings.port, settings.dtype) == (9002, "bfloat16")
    assert (settings.max_queue_size, settings.rerank_max_queue) == (7, 3)


def test_demo_overrides_the_models_and_the_hub(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("DENSE_EMBEDDING_MODEL=another/model\nHF_HUB_OFFLINE=false\n")
    monkeypatch.setenv("EMBEDDING_MODEL", "a/third")
    settings = load_settings(["--demo", "--reranker-model", "none"])
    assert settings.embedding_model == settings.dense_embedding_model == "smart-embedder-demo"
    assert (settings.reranker_model, settings.hf_hub_offline) == ("none", True)
    assert load_settings(["--demo"]).reranker_model == "late-interaction"


def test_every_setting_is_a_flag() -> None:
    flags = {
        f"--{name.lower().replace('_', '-')}": value for name, value in listed_settings().items()
    }
    assert load_settings([part for flag in flags.items() for part in flag]) == Settings()


def test_a_boolean_flag_needs_no_value_and_an_empty_one_counts_as_not_set(
    monkeypatch,
) -> None:
    monkeypatch.setenv("LOG_FORMAT", "json")
    arguments = ["--reproducible", "--protect-metrics", "false", "--log-format", ""]
    settings = load_settings(arguments)
    assert (settings.reproducible, settings.protect_metrics) == (True, False)
    assert settings.log_format == "json"


def test_the_file_of_models_is_read_with_the_settings(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("- name: own/one\n- name: own/two\n")
    models = load_settings(["--models", "models.yaml"]).models
    assert models is not None
    assert [model.name for model in models] == ["own/one", "own/two"]


def test_all_wrong_values_are_named_and_empty_ones_count_as_not_set(monkeypatch) -> None:
    monkeypatch.setenv("DTYPE", "")
    monkeypatch.setenv("MAX_BATCH_TOKENS", "")
    assert load_settings() == Settings()
    monkeypatch.setenv("PORT", "x")
    monkeypatch.setenv("DTYPE", "y")
    with pytest.raises(StartupError, match=r"DTYPE=y .*; PORT=x "):
        load_settings()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-queue-size", "0"], "MAX_QUEUE_SIZE=0 is not allowed: a number of requests, at"),
        (["--max-queu-size", "1"], "there is no flag --max-queu-size: the nearest is --max-queue-"),
        (["--api_token=hush"], "there is no flag --api_token: the nearest is --api-token"),
        (
            ["--model-id=a/b"],
            "there is no flag --model-id: here it is --embedding-model or --reran",
        ),
        (["--trust-remote-code"], "there is no flag --trust-remote-code: code of a model is never"),
        (["--port"], "argument --port: expected one argument"),
        (["--device=cpu", "--dtype=float16"], "DTYPE=float16 is for GPUs; on a CPU use"),
        (["--models=none.yaml"], "MODELS=none.yaml cannot be read: "),
        (
            ["--torch-compile"],
            "there is no flag TORCH_COMPILE, which was removed: it had no",
        ),
        (["--hf-token=hush"], "there is no flag --hf-token: it is the variable HF_TOKEN, in the"),
        (["--hf-api-token=hush"], "there is no flag --hf-api-token: here it is the variable HF_T"),
        (["hush"], "flags begin with --, and one of the arguments belongs to no flag"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        load_settings(arguments)
    assert str(caught.value).startswith(sentence)
    assert "hush" not in str(caught.value)


HELP = """
import atexit, runpy, sys, threading
import app.run, app.settings, smart_embedder.engine
from app.main import create_app
assert "app" not in vars(sys.modules["app.main"])
assert threading.active_count() == 1
sys.argv = ["app", "--help"]
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
runpy.run_module("app", run_name="__main__")
"""


def test_help_lists_every_flag_with_its_meaning_and_imports_have_no_side_effects(tmp_path) -> None:
    """They do not import torch, read the environment or start threads."""
    done = run_script(HELP, folder=tmp_path, COLUMNS="100", PORT="not a port")
    assert (done.returncode, done.stderr) == (0, "False\n")
    output = "".join(done.stdout.split())  # A line may end at a hyphen.
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in output
        assert "".join(without_markup(meaning(name)).split()) in output
    assert "(default:200)" in output


def test_an_unknown_name_in_dotenv_stops_the_start_with_the_nearest_setting(tmp_path) -> None:
    (tmp_path / ".env").write_text("PORT=0\nMAX_QUEU_SIZE=3\nexport api_tokn=hush\n")
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert str(caught.value) == (
        ".env sets MAX_QUEU_SIZE, which is not a setting: the nearest is MAX_QUEUE_SIZE; "
        ".env sets api_tokn, which is not a setting: the nearest is API_TOKEN"
    )


def test_dotenv_may_hold_compose_variables_and_a_byte_order_mark(monkeypatch, tmp_path) -> None:
    """Editors on Windows write a byte order mark."""
    monkeypatch.setattr(os, "environ", {})  # `load_settings` exports variables of libraries to it.
    lines = [f"{name}={value}\n" for name, value in listed_for_others().items()]
    (tmp_path / ".env").write_text("".join(["PORT=9000\n", *lines]), encoding="utf-8-sig")
    assert load_settings() == Settings(port=9000)
    (tmp_path / ".env").write_bytes(b"PORT=9000\nAPI_TOKEN=\xff\n")
    with pytest.raises(StartupError, match=r"^\.env cannot be read: "):
        load_settings()


def test_variables_of_libraries_are_exported_from_dotenv_unless_they_are_set(
    monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {"http_proxy": "http://here:1", "HF_ENDPOINT": ""})
    lines = ["hf_token=hush", "HF_ENDPOINT=http://hub", "HTTP_PROXY=http://there:1", "NO_PROXY="]
    (tmp_path / ".env").write_text("\n".join(lines))
    load_settings()
    assert os.environ == {
        "http_proxy": "http://here:1",
        "HF_ENDPOINT": "http://hub",
        "HF_TOKEN": "hush",
    }


def test_a_removed_setting_in_dotenv_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TORCH_COMPILE=false\n")
    with pytest.raises(
        StartupError, match=r"^\.env sets TORCH_COMPILE, which was removed: it had no"
    ):
        load_settings()


def test_dotenv_is_read_as_docker_compose_reads_it(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NAME", "mine")
    lines = ["RERANKER_MODEL='own/$NAME'", 'EMBEDDING_MODEL="own/${NAME}" # it', "PORT=${NONE:-7}"]
    (tmp_path / ".env").write_text("\n".join(lines))
    settings = load_settings()
    assert (settings.embedding_model, settings.port) == ("own/mine", 7)
    assert settings.reranker_model == "own/$NAME"


def test_misspelt_settings_in_the_environment_are_found() -> None:
    near = {
        "DEVICES": "DEVICE",
        "DYTEP": "DTYPE",
        "MAX_QUEU_SIZE": "MAX_QUEUE_SIZE",
        "POTR": "PORT",
        "PROT": "PORT",
        "XLOG_LEVELX": "LOG_LEVEL",
        "rate_limit_brust_size": "RATE_LIMIT_BURST_SIZE",
    }
    far = ["HOME", "HOSTNAME", "PATH", "TERM", "MAX_QUEUE", "OTHER", "MEMORY_LIMITS"]
    # Two extra letters in a name of five; three extra ones, and one missing.
    far += ["DTYPEXY", "LOG_LEVEXYZ"]
    # One letter from UI, and set by build machines and shells.
    far += ["CI", "UID"]
    environment = dict.fromkeys([*near, *far, *listed_settings(), *listed_for_others()], "")
    assert dict(unknown_names(environment)) == near


# The compose files.


def test_compose_variables_are_listed_with_the_defaults_of_compose() -> None:
    text = (REPOSITORY / "docker-compose.cpu.yml").read_text()
    found = dict(VARIABLE.findall(text))
    for name in ("API_TOKENS_FILE", "TRUSTED_PROXIES"):
        found.pop(name)  # Without a default in compose, the service has its own.
    # Caddy asks once a second whether a replica ends.
    assert found.pop("SHUTDOWN_DELAY") == "2"
    assert found.items() <= (listed_settings() | listed_for_others()).items()
    for name in engine.LIBRARY_VARIABLES:
        found.setdefault(name, listed_for_others()[name])
    assert OF_OTHERS | found == found | listed_for_others()
    assert f"name: {OF_OTHERS['COMPOSE_PROJECT_NAME']}\n" in text


def test_other_variables_have_a_description_and_are_not_settings() -> None:
    variables = (*COMPOSE_VARIABLES, *LIBRARY_VARIABLES)
    assert all(variable.description for variable in variables)
    assert {variable.name for variable in COMPOSE_VARIABLES} == service.COMPOSE_VARIABLES
    assert {variable.name for variable in LIBRARY_VARIABLES} == engine.LIBRARY_VARIABLES
    assert not set(listed_for_others()) & set(listed_settings())
