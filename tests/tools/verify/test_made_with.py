"""`tools.verify --made-with`: the settings of vectors that sentence-transformers made are found."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams

from tests.support.encoders import (
    reference_vectors,
    save_family,
    save_modules,
    word_tokenizer,
)
from tests.support.qdrant.process import run_qdrant
from tests.support.texts import varied_texts
from tools.verify.__main__ import main

VARIED = [text for text in varied_texts(40) if text.strip()]
# Few, because the tool makes vectors of each short text in 24 ways.
TEXTS = [*VARIED[::5], "Hybrid Search Joins Meaning And Words"]
TEXTS += [" ".join(VARIED), " ".join(reversed(VARIED))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with mean pooling."""
    return save_modules(save_family(tmp_path / "tiny-gte", "gte", word_tokenizer()))


@pytest.fixture
def verify(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Run the tool on vectors of TEXTS, with the model in `folder`."""
    monkeypatch.chdir(tmp_path)
    defaults = {"DEVICE": "cpu", "EMBEDDING_MODEL": str(folder), "RERANKER_MODEL": "none"}
    for name, value in defaults.items():
        monkeypatch.setenv(name, value)

    def run(vectors: np.ndarray) -> tuple[int, str]:
        rows = zip(TEXTS, vectors.tolist(), strict=True)
        lines = [json.dumps({"text": text, "vector": vector}) for text, vector in rows]
        (tmp_path / "vectors.jsonl").write_text("\n".join(lines), "utf-8")
        status = main(["--made-with", "vectors.jsonl"])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"prompt": "passage: "}, 'made with the prompt "passage: "'),
        ({"pooling": "max_tokens"}, "made with POOLING=max:"),
        ({"max_seq_length": 64}, "made with BGE_EMBED_MAX_LENGTH=64:"),
        ({"do_lower_case": True, "pooling": "cls_token"}, 'POOLING=cls and "do_lower_case": true'),
        ({"normalize": True}, "agree in direction with"),
    ],
)
def test_setting_of_other_vectors_is_found(
    options: dict[str, Any], setting: str, folder: Path, verify, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    names = {"max_seq_length", "do_lower_case"} & options.keys()
    texts = {name: options[name] for name in names}
    save_modules(
        other, {f"pooling_mode_{options.get('pooling', 'mean_tokens')}": True}, texts=texts
    )
    prompt, normalize = options.get("prompt"), options.get("normalize", False)
    vectors = reference_vectors(other, TEXTS, prompt=prompt, normalize_embeddings=normalize)
    status, output = verify(vectors)
    assert status == 1
    assert setting in output, output
    assert ("(NORMALIZE=true)" in output) == bool(normalize)


def test_vectors_of_another_model_match_no_setting(tmp_path: Path, verify) -> None:
    other = save_modules(save_family(tmp_path / "other", "gte", word_tokenizer()))
    status, output = verify(-reference_vectors(other, TEXTS))
    assert status == 1
    assert re.match(r"None of \d+ combinations", output)


@pytest.mark.usefixtures("verify")
def test_vectors_of_the_present_settings_in_qdrant_may_be_mixed(folder: Path, capsys) -> None:
    vectors = reference_vectors(folder, TEXTS)
    with run_qdrant() as server:
        client = QdrantClient(server.url, check_compatibility=False)
        params = VectorParams(size=vectors.shape[1], distance=Distance.DOT)
        client.create_collection("docs", {"fast": params})
        rows = enumerate(zip(TEXTS, vectors.tolist(), strict=True))
        points = [
            PointStruct(id=index, vector={"fast": vector}, payload={"document": text})
            for index, (text, vector) in rows
        ]
        client.upsert("docs", points)
        url = f"{server.url}/collections/docs"
        assert main(["--made-with", url, "--text-field", "document"]) == 0
        output = capsys.readouterr().out
        assert "may be mixed" in output
        assert f"of {len(TEXTS)} texts" in output
        assert "float32 explains" in output
        assert main(["--made-with", url]) == 2
    assert "no texts in 'text'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read"),
        ("[1]", "not a JSON object"),
        ('{"text": "a"}', "no texts"),
        ('{"text": "a", "vector": [1]}\n{"text": "b", "vector": [1, 2]}', "several widths"),
        (f'{{"text": "a", "vector": {[1.0] * 999}}}', "of another model"),
    ],
)
@pytest.mark.usefixtures("verify")
def test_unusable_files_are_refused(content: str, sentence: str, capsys) -> None:
    Path("vectors.jsonl").write_text(content)
    assert main(["--made-with", "vectors.jsonl"]) == 2
    assert sentence in capsys.readouterr().err
