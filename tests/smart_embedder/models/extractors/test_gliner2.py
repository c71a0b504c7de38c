"""GLiNER2, compared with the package's own class on random checkpoints."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.models.extractors.windows import keep_middles
from smart_embedder.models.loader import load_extractor
from smart_embedder.requests import ExtractRequest, Outputs
from smart_embedder.results import Span
from tests.support.checkpoints import plain_corpus
from tests.support.classifiers import DEBERTA, random_texts, save_gliner2
from tests.support.encoders import float32
from tests.support.wordpiece import MODERNBERT

engine = pytest.importorskip("gliner2.inference.engine", reason="needs the extra gliner2")
decoder = pytest.importorskip("gliner2.inference.candidate_decoder")
gliner2 = pytest.importorskip("smart_embedder.models.extractors.gliner2")

LABELS = ["person", "place", "a search engine"]
# The random scores are low.
THRESHOLD = 0.05
OPTIONS = {"threshold": THRESHOLD, "include_confidence": True, "include_spans": True}
KINDS: dict[str, Any] = {"DebertaV2": DEBERTA, "Bert": {}, "ModernBert": MODERNBERT}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gliner2")
    return {kind: save_gliner2(root / kind, kind, **changes) for kind, changes in KINDS.items()}


@pytest.fixture(scope="module")
def model(folders) -> Any:
    return ours(folders["DebertaV2"])


def ours(folder: Path, max_length: int = 8192) -> Any:
    return load_extractor(folder.name, folder, max_length, float32())


def asking(texts: list[str], labels: list[str] | None = None) -> ExtractRequest:
    return ExtractRequest(texts, LABELS if labels is None else labels, THRESHOLD)


def read(model: Any, request: ExtractRequest) -> list[Any]:
    return model.tokenize_windows(request, lambda _: None)


def find(model: Any, text: str, labels: list[str] | None = None) -> list[Span]:
    request = asking([text], labels)
    (windows,) = read(model, request)
    results = model.forward(windows.sequences, Outputs()) if windows.sequences else []
    return list(model.find_spans(text, windows, results, request))


def places(text: str, found: dict[str, Any]) -> list[tuple[int, int, str, float]]:
    """Return the package's spans as ours, which leave out the full stop that is not in the text."""
    spans = [
        (span["start"], min(span["end"], len(text)), label, span["confidence"])
        for label, of_label in found["entities"].items()
        for span in of_label
        if span["start"] < len(text)
    ]
    return sorted(spans, key=lambda span: span[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_spans_of_random_texts_equal_the_package(folders, kind) -> None:
    """84 texts, alone and in one batch: scores within 1e-5, and from the same scores its spans."""
    model, request = ours(folders[kind]), asking(random_texts(84, seed=len(kind)))
    reference = engine.SpanExtractor.from_pretrained(str(folders[kind])).eval()
    scores, decode = [], reference._extract_entities

    def keep_scores(names: Any, values: Any, *options: Any) -> Any:
        scores.append(values[0].permute(1, 0, 2).numpy())
        return decode(names, values, *options)

    reference._extract_entities = keep_scores
    found = reference.batch_extract_entities(request.texts, LABELS, **OPTIONS)
    windows, seen = read(model, request), 0
    chosen = [index for index, text in enumerate(windows) if len(text.sequences) == 1]
    assert len(chosen) >= 80
    sequences = [windows[index].sequences[0] for index in chosen]
    together = model.forward(sequences, Outputs())
    for index, sequence, result in zip(chosen, sequences, together, strict=True):
        text = request.texts[index]
        (alone,) = model.forward([sequence], Outputs())
        expected_scores = scores[index].reshape(result.shape)
        np.testing.assert_allclose(result, expected_scores, rtol=0, atol=1e-5)
        np.testing.assert_allclose(alone, expected_scores, rtol=0, atol=1e-5)
        spans = [*model.find_spans(text, windows[index], [scores[index]], request)]
        expected = places(text, found[index])
        assert [(s.start, s.end, s.label, s.score) for s in spans] == expected, text
        assert [span.text for span in spans] == [text[s[0] : s[1]] for s in expected]
        seen += len(spans)
    assert seen > 100


def test_requests_with_different_labels_share_a_batch(model) -> None:
    texts = plain_corpus(12)
    requests = [asking([text], LABELS[: 1 + index % 3]) for index, text in enumerate(texts)]
    sequences = [read(model, request)[0].sequences[0] for request in requests]
    for index, result in enumerate(model.forward(sequences, Outputs())):
        (alone,) = model.forward([sequences[index]], Outputs())
        np.testing.assert_allclose(result, alone, rtol=0, atol=1e-5)
        words = len(sequences[index].arrays["words"])
        assert result.shape == (words * (1 + index % 3), 4)


def test_a_long_text_is_read_in_windows_behind_its_labels(model) -> None:
    text = " ".join(plain_corpus(60))
    (windows,) = read(model, asking([text]))
    (short,) = read(model, asking(["a"]))
    before = short.sequences[0].arrays["words"][0]
    assert len(windows.sequences) > 5
    for words, sequence in zip(windows.windows, windows.sequences, strict=True):
        assert len(sequence) <= model.max_length
        assert np.array_equal(sequence[:before], short.sequences[0][:before])
        assert np.array_equal(sequence[sequence.arrays["words"]], windows.spans.ids[words])
    assert windows.windows[0].start == 0
    assert windows.windows[-1].stop == len(windows.spans.ids)
    overlaps = [
        first.stop - second.start
        for first, second in zip(windows.windows, windows.windows[1:], strict=False)
    ]
    assert min(overlaps) > 4
    results = model.forward(windows.sequences, Outputs())
    rows = [result.reshape(-1, len(LABELS), 4) for result in results]
    assert len(keep_middles(windows.windows, rows)) == len(windows.spans.ids)
    spans = find(model, text)
    assert spans[-1].end > len(text) * 0.9
    assert len({(span.start, span.end, span.label) for span in spans}) == len(spans)


def test_words_without_tokens_are_read_at_the_ends_of_windows(folders) -> None:
    model = ours(folders["Bert"])
    text = "\u200d vector \u200d " * 300
    (windows,) = read(model, asking([text]))
    places = [sequence.arrays["words"] for sequence in windows.sequences]
    assert any(words[-1] == words[-2] for words in places)
    assert find(model, text)[-1].end > len(text) * 0.9


def test_without_predicted_spans_there_are_none(tmp_path) -> None:
    model = ours(save_gliner2(tmp_path / "none", count_bias=1e6, **DEBERTA))
    request = ExtractRequest([*plain_corpus(2)], LABELS, 0.0)
    for text, windows in zip(request.texts, read(model, request), strict=True):
        results = model.forward(windows.sequences, Outputs())
        assert [*model.find_spans(text, windows, results, request)] == []


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_overlapping_spans_are_chosen_as_the_package_does(threshold) -> None:
    rng = np.random.default_rng(1)
    for words in (1, 2, 9, 40):
        # Rounded, so that many are equal.
        scores = rng.random((words, 4)).round(1).astype(np.float32)
        raw = [
            ("a", float(scores[start, width]), start, start + width + 1)
            for start in range(words)
            for width in range(4)
            if scores[start, width] >= np.float32(threshold) and start + width < words
        ]
        expected = [span[1:] for span in decoder.finalize_spans(raw)]
        chosen = gliner2.choose_spans(scores, threshold)
        assert [(score, start, stop + 1) for start, stop, score in chosen] == expected


@pytest.mark.parametrize(
    ("text", "labels", "message"),
    [
        ("a", ["x" * 200] * 100 + ["y"], "the labels take"),
        ("a." * 257, LABELS, "a word of more than 512 characters, the most"),
        ("word " * 200 + "weight" * 12, LABELS, r"a word of more than 1\d tokens"),
        ("ж" * 1_000_000, LABELS, r"a word of more than 4096 characters"),
    ],
)
def test_what_leaves_no_room_in_a_window_is_refused(model, text, labels, message) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(model, asking([text], [f"{index}{label}" for index, label in enumerate(labels)]))


def test_words_of_a_long_text_are_counted_before_they_are_read(model) -> None:
    counts: list[int] = []

    def check(count: int) -> None:
        counts.append(count)
        if count > 5000:
            raise InvalidRequestError("too many")

    with pytest.raises(InvalidRequestError, match="too many"):
        model.tokenize_windows(asking(["! " * 10_000]), check)
    assert counts == [128 * 20_000 // model.token_bytes(asking([])), *range(1, 5002)]
    counts.clear()
    with pytest.raises(InvalidRequestError, match="too many"):
        model.tokenize_windows(asking(["word" * 1_000_000]), check)
    assert len(counts) == 1


def test_the_vector_space_follows_from_the_weights(folders, tmp_path) -> None:
    same = shutil.copytree(folders["DebertaV2"], tmp_path / "same")
    other = save_gliner2(tmp_path / "other", count_bias=1.0, **DEBERTA)
    ids = [ours(folder).info.vector_space for folder in (folders["DebertaV2"], same, other)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "encoder_config/config.json",
            {"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}},
            "contains custom code",
        ),
        ("config.json", {"architecture": "boundary"}, "only span and first are computed"),
        ("config.json", {"token_pooling": "mean"}, "only span and first are computed"),
        ("config.json", {"max_width": 5, "counting_layer": "count_lstm"}, "cannot load the model"),
    ],
)
def test_a_folder_that_cannot_be_computed_is_refused(
    folders, tmp_path, file, changes, message
) -> None:
    folder = shutil.copytree(folders["DebertaV2"], tmp_path / "changed")
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    with pytest.raises(StartupError, match=message):
        ours(folder)


def test_without_the_package_the_start_says_how_to_install_it(folders, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gliner2.configuration", None)
    with pytest.raises(StartupError, match=r"needs the package gliner2: pip install '\.\[gliner2"):
        ours(folders["Bert"])


def test_a_model_of_gliner_is_refused(folders, tmp_path) -> None:
    folder = shutil.copytree(folders["Bert"], tmp_path / "gliner")
    (folder / "gliner_config.json").write_text("{}", "utf-8")
    with pytest.raises(StartupError, match="a model of GLiNER, whose package needs"):
        ours(folder)
