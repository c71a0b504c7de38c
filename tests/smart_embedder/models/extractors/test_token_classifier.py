"""Token classifiers, compared with transformers' classes and with its pipeline."""

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForTokenClassification, AutoTokenizer

from smart_embedder.errors import StartupError
from smart_embedder.models.extractors.token_classifier import TokenClassifier
from smart_embedder.models.extractors.windows import divide, keep_middles
from smart_embedder.models.loader import load_extractor
from smart_embedder.requests import Aggregation, ExtractRequest, Outputs
from smart_embedder.results import Span
from tests.support.classifiers import random_texts, save_families, save_token_classifier
from tests.support.encoders import float32
from tests.support.wordpiece import MAX_LENGTH, change

FAMILIES = ("bert", "xlm-roberta", "roberta", "deberta-v2", "modernbert", "electra")
AGGREGATIONS = get_args(Aggregation)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return save_families(tmp_path_factory.mktemp("classifiers"))


def ours(folder: Path, max_length: int = MAX_LENGTH) -> TokenClassifier:
    return load_extractor(folder.name, folder, max_length, float32())


def read(model: TokenClassifier, texts: list[str]) -> list[Any]:
    return model.tokenize_windows(ExtractRequest(texts), lambda _: None)


def label(model: TokenClassifier, text: str, aggregation: Aggregation) -> list[Span]:
    (windows,) = read(model, [text])
    results = model.forward(windows.sequences, Outputs()) if windows.sequences else []
    request = ExtractRequest([text], aggregation=aggregation)
    return list(model.find_spans(text, windows, results, request))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_spans_of_random_texts_equal_the_pipeline(folders, family) -> None:
    """84 texts for each family, alone and in one batch, with every aggregation."""
    model, texts = ours(folders[family]), random_texts(84, seed=FAMILIES.index(family))
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    reference = AutoModelForTokenClassification.from_pretrained(folders[family]).eval()
    pipeline = transformers.pipeline(
        "token-classification", model=reference, tokenizer=tokenizer, device="cpu"
    )
    windows = read(model, texts)
    assert [len(read.sequences) for read in windows] == [len(read.windows) for read in windows]
    chosen = [index for index, read in enumerate(windows) if len(read.sequences) == 1]
    assert len(chosen) >= 80
    sequences = [windows[index].sequences[0] for index in chosen]
    together, seen = model.forward(sequences, Outputs()), 0
    for index, sequence, logits in zip(chosen, sequences, together, strict=True):
        text = texts[index]
        outputs = [
            pipeline.forward(inputs)
            for inputs in pipeline.preprocess(text, is_split_into_words=False)
        ]
        mask = outputs[0]["special_tokens_mask"][0].numpy() == 0
        expected = outputs[0]["logits"][0].numpy()[mask]
        (alone,) = model.forward([sequence], Outputs())
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-5)
        for aggregation in AGGREGATIONS:
            strategy = transformers.pipelines.token_classification.AggregationStrategy(aggregation)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = pipeline.postprocess(outputs, aggregation_strategy=strategy)
            key = "entity" if aggregation == "none" else "entity_group"
            request = ExtractRequest([text], aggregation=aggregation)
            spans = list(model.find_spans(text, windows[index], [expected], request))
            assert [(span.start, span.end, span.label) for span in spans] == [
                (span["start"], span["end"], span[key]) for span in found
            ], (text, aggregation)
            scores = [span["score"] for span in found]
            np.testing.assert_allclose([span.score for span in spans], scores, rtol=0, atol=1e-6)
            assert [span.text for span in spans] == [text[s["start"] : s["end"]] for s in found]
            seen += len(spans)
    assert seen > 1000


def test_a_long_text_is_read_in_windows_whose_middles_are_kept(folders) -> None:
    model, limit = ours(folders["bert"], 64), 64
    reference = AutoModelForTokenClassification.from_pretrained(folders["bert"]).eval()
    text = " ".join(random_texts(40, seed=9))
    (windows,) = read(model, [text])
    count, (first, *_, last) = len(windows.spans.ids), windows.windows
    assert count > 5 * limit
    assert (first.start, last.stop) == (0, count)
    assert {len(sequence) for sequence in windows.sequences} == {limit}
    results = model.forward(windows.sequences, Outputs())
    assert [len(rows) for rows in results] == [limit - 2] * len(windows.windows)
    kept = keep_middles(windows.windows, results)
    assert len(kept) == count
    with torch.no_grad():
        alone = [reference(torch.tensor(ids)[None]).logits[0, 1:-1] for ids in windows.sequences]
    for token, row in enumerate(kept):
        distances = [min(token - read.start, read.stop - 1 - token) for read in windows.windows]
        nearest = [
            rows[token - read.start]
            for rows, read, distance in zip(alone, windows.windows, distances, strict=True)
            if distance >= max(distances) - 1 and distance >= 0
        ]
        assert any(np.allclose(row, expected, rtol=0, atol=1e-5) for expected in nearest)
        assert token < 8 or token >= count - 8 or max(distances) >= 7


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_spans_of_a_long_text_are_in_order_and_never_overlap(folders, aggregation) -> None:
    text = " ".join(random_texts(30, seed=3))
    spans = label(ours(folders["roberta"], 32), text, aggregation)
    assert len(spans) > 100
    assert all(first.end <= second.start + 1 for first, second in pairwise(spans))
    starts = [span.start for span in spans]
    assert starts == sorted(starts)
    assert all(text[span.start : span.end] == span.text for span in spans)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (8, 8, [(0, 8)]),
        (9, 8, [(0, 8), (1, 9)]),
        (14, 8, [(0, 8), (6, 14)]),
        (15, 8, [(0, 8), (6, 14), (7, 15)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_windows_overlap_by_a_quarter_and_the_last_one_is_full(count, size, expected) -> None:
    assert divide(0, size) == []
    windows = divide(count, size)
    assert [(window.start, window.stop) for window in windows] == expected
    rows = [np.arange(window.start, window.stop) for window in windows]
    assert keep_middles(windows, rows).tolist() == [*range(count)]


def test_tokens_are_counted_while_texts_are_tokenized(folders) -> None:
    counted = list[int]()
    ours(folders["bert"]).tokenize_windows(
        ExtractRequest(["hybrid search", "", "vector"]), counted.append
    )
    assert counted[-1] == 3


def test_labels_without_names_are_numbered_and_those_of_the_outside_left_out(tmp_path) -> None:
    folder = save_token_classifier(tmp_path / "m", "Bert", labels=("O", "B-PER", "I-PER", "x"))
    model = ours(folder)
    assert model.names("none") == ("B-PER", "I-PER", "x")
    assert model.names("simple") == model.names("max") == ("PER", "x")
    change(folder / "config.json", id2label={"0": "O"})
    assert ours(folder).names("simple") == ("LABEL_1", "LABEL_2", "LABEL_3")


def test_another_label_or_weight_makes_another_id(tmp_path) -> None:
    folder = save_token_classifier(tmp_path / "m", "Bert")
    before, limit = ours(folder).spaces["score"], ours(folder, 64).spaces["score"]
    assert str(ours(folder).spaces["score"]) == str(before)
    change(folder / "config.json", id2label={"0": "O", "1": "B-ORG"})
    renamed = ours(folder).spaces["score"]
    assert len({str(before), str(limit), str(renamed)}) == 3
    assert (renamed.weights, renamed.tokenizer) == (before.weights, before.tokenizer)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("BertForSequenceClassification", "holds no model that labels tokens"),
        ("BertForTokenClassification", "lacks the tensor classifier.weight"),
    ],
)
def test_a_folder_without_a_token_classifier_is_refused(tmp_path, architecture, message) -> None:
    folder = tmp_path / "m"
    save_token_classifier(folder, "Bert")
    save_transformer_without_head(folder)
    change(folder / "config.json", architectures=[architecture])
    with pytest.raises(StartupError, match=message):
        ours(folder)


def save_transformer_without_head(folder: Path) -> None:
    transformers.BertModel.from_pretrained(folder).save_pretrained(folder)
