"""Settings: defaults of the contract, wrong values refused by name, .env.example complete."""

import re
from pathlib import Path

import pytest

from app.errors import StartupError
from app.settings import Settings, load_settings

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "host": "127.0.0.1",
    "port": 8000,
    "embedding_model": "BAAI/bge-m3",
    "dense_embedding_model": None,
    "dense_model": "BAAI/bge-m3",
    "reranker_model": "BAAI/bge-reranker-v2-m3",
    "model_revision": None,
    "hf_hub_offline": False,
    "device": "auto",
    "dtype": "auto",
    "attention": "auto",
    "max_input_length": 8192,
    "embed_max_length": 8192,
    "qwen_embed_max_length": 32768,
    "bge_rerank_max_length": 8192,
    "qwen_rerank_max_length": 32768,
    "qwen_rerank_batch_size": 16,
    "max_batch_tokens": "auto",
    "batch_wait_ms": 0,
    "tokenizer_threads": "auto",
    "max_queue_size": 200,
    "rerank_max_queue": 32,
    "request_timeout": 90,
    "rerank_gpu_timeout": 60,
    "shutdown_timeout": 30,
    "max_sentences_per_request": 1024,
    "max_rerank_passages": 1024,
    "max_body_bytes": 33_554_432,
    "api_token": None,
    "api_tokens_file": None,
    "protect_metrics": False,
    "log_format": "console",
    "log_level": "info",
}


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)


def test_defaults_are_those_of_the_contract() -> None:
    settings = load_settings()
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("PORT", "70000"),
        ("DEVICE", "gpu"),
        ("DEVICE", "cuda:x"),
        ("DTYPE", "float64"),
        ("ATTENTION", "flash"),
        ("MAX_BATCH_TOKENS", "0"),
        ("MAX_BATCH_TOKENS", "many"),
        ("MAX_INPUT_LENGTH", "-1"),
        ("BGE_EMBED_MAX_LENGTH", "1.5"),
        ("BATCH_WAIT_MS", "-1"),
        ("TOKENIZER_THREADS", "0"),
        ("MAX_QUEUE_SIZE", "0"),
        ("REQUEST_TIMEOUT", "inf"),
        ("REQUEST_TIMEOUT", "0"),
        ("SHUTDOWN_TIMEOUT", "soon"),
        ("MAX_SENTENCES_PER_REQUEST", "0"),
        ("MAX_BODY_BYTES", "32M"),
        ("HF_HUB_OFFLINE", "perhaps"),
        ("PROTECT_METRICS", "perhaps"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
        ("EMBEDDING_MODEL", "   "),
        ("RERANKER_MODEL", "   "),
        ("QWEN_RERANK_BATCH_SIZE", "0"),
        ("RERANK_MAX_QUEUE", "-3"),
        ("MAX_RERANK_PASSAGES", "0"),
    ],
)
def test_a_wrong_value_names_the_variable_the_value_and_what_is_allowed(
    monkeypatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert str(caught.value).startswith(f"{name}={value} is not allowed: ")
    assert not str(caught.value).endswith(f"see {name} in .env.example")


def test_every_wrong_value_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setenv("PORT", "x")
    monkeypatch.setenv("DTYPE", "y")
    with pytest.raises(StartupError, match=r"PORT=x .*; DTYPE=y "):
        load_settings()


def test_values_that_contradict_each_other_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv("DTYPE", "float16")
    with pytest.raises(StartupError, match="DTYPE=float16 is for GPUs"):
        load_settings()


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_int8_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("DEVICE", device)
    monkeypatch.setenv("DTYPE", "INT8")
    with pytest.raises(StartupError, match=f"DTYPE=int8 is for CPUs; with DEVICE={device} use"):
        load_settings()


def test_a_rerank_must_end_before_its_request(monkeypatch) -> None:
    monkeypatch.setenv("RERANK_GPU_TIMEOUT", "90")
    with pytest.raises(StartupError, match="RERANK_GPU_TIMEOUT=90 must be below REQUEST_TIMEOUT"):
        load_settings()


def test_an_empty_value_counts_as_not_set(monkeypatch) -> None:
    monkeypatch.setenv("DTYPE", "")
    monkeypatch.setenv("MAX_BATCH_TOKENS", "")
    assert load_settings() == Settings()


def test_case_does_not_matter_where_words_are_chosen(monkeypatch) -> None:
    monkeypatch.setenv("DTYPE", "BFloat16")
    monkeypatch.setenv("DEVICE", "CPU")
    assert (load_settings().dtype, load_settings().device) == ("bfloat16", "cpu")


def test_the_newer_length_wins_over_the_older_name(monkeypatch) -> None:
    monkeypatch.setenv("MAX_INPUT_LENGTH", "512")
    assert load_settings().embed_max_length == 512
    monkeypatch.setenv("BGE_EMBED_MAX_LENGTH", "1024")
    assert load_settings().embed_max_length == 1024


def test_dotenv_is_read_and_the_environment_wins(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=9000\nDTYPE=float32\nSOMETHING_ELSE=1\n")
    monkeypatch.setenv("PORT", "9001")
    assert (load_settings().port, load_settings().dtype) == (9001, "float32")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1


def test_env_example_lists_every_setting_with_its_default() -> None:
    text = (REPOSITORY / ".env.example").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^#?\s?([A-Z][A-Z0-9_]+)=(.*)$", text, flags=re.MULTILINE))
    assert set(listed) == {name.upper() for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else str(field.default)
        assert listed[name.upper()].lower() == default.lower(), name


def test_the_two_requirements_files_are_the_same_but_for_torch() -> None:
    def pins(name: str) -> list[str]:
        lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line and not line.startswith(("#", "-", "torch=="))]

    assert pins("requirements-cpu.txt") == pins("requirements-gpu.txt")
    assert all("==" in pin for pin in pins("requirements-cpu.txt"))
