"""The families that people serve, and the outcomes that a run must not hide."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools.matrix import __main__ as matrix
from tools.matrix.__main__ import BEGIN, END, format_outcomes, main, try_all, write_table
from tools.matrix.comparison import (
    CLASSIFIER,
    DIFFERS,
    ENCODER,
    EQUAL,
    MODULE,
    NOT_BUILT,
    REFUSED,
    TRACEBACK,
    Outcome,
    try_model,
)
from tools.matrix.shrinking import Shrinker

ENCODERS = [
    *["bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "deberta-v2", "modernbert"],
    *["nomic_bert", "gte", "eurobert", "electra", "albert", "t5", "qwen3", "llama", "mistral"],
    "clip_text_model",
    # The text part of a model with other inputs.
    *["gemma3", "embedding_gemma2", "qwen3_5"],
    "gemma3n_text",  # A list of widths.
    "doge",  # Attention to the keys of the highest scores.
]
# Others are compared in tests/smart_embedder/models/rerankers.
CLASSIFIERS = ["mpnet", "deberta-v2", "electra", "llama", "nomic_bert", "qwen3"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the tool: for numbers this small a second thread only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, ENCODER) for name in ENCODERS), *((name, CLASSIFIER) for name in CLASSIFIERS)],
)
def test_family_equals_transformers(name: str, kind: str, tmp_path: Path) -> None:
    outcome = try_model(name, kind, tmp_path / "model")
    assert outcome.result == EQUAL, outcome.detail


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SpladePooling", "MultiVectorMask"])
def test_module_equals_sentence_transformers(name: str, tmp_path: Path) -> None:
    outcome = try_model(name, MODULE, tmp_path / "model")
    assert outcome.result == EQUAL, outcome.detail


def test_crashed_and_hanging_processes_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_fake(name: str, kind: str, _: Path) -> Outcome:
        if name == "crashes":
            os._exit(3)
        if name == "hangs":
            time.sleep(1000)
        return Outcome(name, kind, EQUAL, "1e-07")

    monkeypatch.setattr(matrix, "try_model", try_fake)
    monkeypatch.setattr(matrix, "_TIME_LIMIT", 0.5)
    outcomes = try_all([(name, ENCODER) for name in ("crashes", "hangs", "works")], jobs=2)
    found = {outcome.name: (outcome.is_failed, outcome.detail) for outcome in outcomes}
    assert found["crashes"] == (True, "process ended with status 3")
    assert found["hangs"] == (True, "none after 0 s")
    assert found["works"] == (False, "1e-07")


def test_exit_status_is_1_after_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = {EQUAL: 0, REFUSED: 0, NOT_BUILT: 0, DIFFERS: 1, TRACEBACK: 1}
    for result, status in statuses.items():
        outcome = Outcome("bert", ENCODER, result)
        monkeypatch.setattr(matrix, "try_all", lambda *_, outcome=outcome: iter([outcome]))
        assert main(["bert"]) == status


def test_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["brain"])
    assert "neither transformers nor sentence-transformers has brain" in capsys.readouterr().err


def test_table_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    outcomes = [
        Outcome("vit_text", ENCODER, REFUSED, "reads a|b"), Outcome("bert", ENCODER, EQUAL, "0"),
        Outcome("mpnet", ENCODER, EQUAL, "1e-07"),
    ]  # fmt: skip
    write_table(page, outcomes)
    write_table(page, outcomes)
    text = page.read_text()
    assert text == f"before\n{BEGIN}\n{format_outcomes(outcomes)}\n{END}\nafter\n"
    equal, refused = text.splitlines()[4:6]
    assert equal == "| equal (2) | `bert`, `mpnet` |"
    assert refused == r"| refused: reads a\|b (1) | `vit_text` |"


def test_shrunken_configuration_keeps_a_layer_of_each_kind() -> None:
    config = {
        "num_hidden_layers": 6, "hidden_size": 4096, "vocab_size": 99_999, "head_dim": 128,
        "layer_types": [*["sliding"] * 5, "full"], "image_token_id": 88_888, "eos_token_id": 77,
        "per_layer_config": {"05": {"head_dim": 256}}, "vision_config": {"depth": 24},
    }  # fmt: skip
    small = Shrinker().shrink(config)
    assert small == {
        "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 480, "head_dim": 16,
        "layer_types": ["sliding", "full"], "image_token_id": 479, "eos_token_id": 3,
        "per_layer_config": {1: {"head_dim": 16}}, "vision_config": {"depth": 2},
    }  # fmt: skip
