"""Texts and pictures in one space, compared with transformers and sentence-transformers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoProcessor,
    AutoTokenizer,
    ProcessorMixin,
)
from transformers.models.auto.feature_extraction_auto import AutoFeatureExtractor
from transformers.models.auto.video_processing_auto import AutoVideoProcessor

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import (
    AnswerMemory,
    EmbedRequest,
    ImageInput,
    Outputs,
    RerankRequest,
)
from tests.smart_embedder.engines import engine_on_cpu
from tests.support.checkpoints import changed_weights
from tests.support.encoders import assert_close, embed, float32, load
from tests.support.pictures import (
    FAMILIES,
    MESSAGES,
    PAGES,
    POSITIONS,
    PROMPTS,
    draw_picture,
    input_of,
    save_image_text,
    save_messages,
    save_pages,
)
from tests.support.wordpiece import change

PICTURES = [draw_picture(70, 40), draw_picture(32, 32), draw_picture(90, 300)]
TEXTS = ["hybrid search", "", "vector " * 60]
MIXED = [TEXTS[0], PICTURES[0], TEXTS[1], PICTURES[1], PICTURES[2], TEXTS[2]]


def inputs_of(items: list[Any]) -> list[Any]:
    return [item if isinstance(item, str) else input_of(item) for item in items]


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return save_image_text(tmp_path_factory.mktemp("models") / "clip", "clip")


@torch.inference_mode()
def reference_vectors(folder: Path) -> np.ndarray:
    """Embed `MIXED` with the classes of transformers, one by one."""
    model = AutoModel.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    padding = "max_length" if folder.name.startswith("siglip") else False
    options = {"padding": padding, "truncation": True, "max_length": POSITIONS}
    features = [
        model.get_text_features(**tokenizer([item], return_tensors="pt", **options))
        if isinstance(item, str)
        else model.get_image_features(**processor(images=item, return_tensors="pt"))
        for item in MIXED
    ]
    return np.concatenate([found.pooler_output.numpy() for found in features])


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_pictures_of_each_family_match_transformers(family, tmp_path) -> None:
    folder = save_image_text(tmp_path / family, family)
    model = load(folder)
    alone = np.concatenate([embed(model, [item]) for item in inputs_of(MIXED)])
    assert_close(alone, reference_vectors(folder))
    assert_close(embed(model, inputs_of(MIXED)), alone)
    assert model.reads_images
    assert not model.normalizes


@torch.inference_mode()
def reference_vectors_of_pages(folder: Path, items: list[Any]) -> list[np.ndarray]:
    """Embed queries and pictures of pages with the classes of transformers, one by one."""
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    model = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    model = model.from_pretrained(folder).eval()
    vectors = []
    for item in items:
        process = processor.process_queries if isinstance(item, str) else processor.process_images
        inputs = process([item], return_tensors="pt")
        inputs.pop("labels", None)
        vectors.append(model(**inputs).embeddings[0].numpy())
    return vectors


@pytest.mark.parametrize("family", PAGES)
def test_queries_and_pages_of_each_family_match_transformers(family, tmp_path) -> None:
    folder = save_pages(tmp_path / family, family)
    model: Any = load_embedder(family, folder, 8192, float32())
    items = ["hybrid search", PICTURES[0], "vector river. " * 9, PICTURES[2], ""]
    sequences = [text.ids for text in model.tokenize(inputs_of(items), input_type="query")]
    expected = reference_vectors_of_pages(folder, items)
    together = model.forward(sequences, Outputs(colbert=True))
    for ids, row, theirs in zip(sequences, together, expected, strict=True):
        (alone,) = model.forward([ids], Outputs(colbert=True))
        assert len(ids) == len(theirs)
        assert_close(alone.colbert, theirs)
        assert_close(row.colbert, theirs)


def test_a_processor_of_pages_that_reads_none_is_refused(tmp_path) -> None:
    folder = save_pages(tmp_path, "colmodernvbert")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(StartupError, match="cannot read a picture: Asking to pad but the tok"):
        load_embedder("pages", folder, 64, float32())


async def test_late_interaction_ranks_pictures_of_pages_for_a_query(tmp_path) -> None:
    folder = save_pages(tmp_path / "colqwen2", "colqwen2")
    async with engine_on_cpu(folder, reranker_model="late-interaction") as engine:
        result = await engine.rerank(RerankRequest("hybrid search", inputs_of(PICTURES)))
        query, *pages = reference_vectors_of_pages(folder, ["hybrid search", *PICTURES])
        expected = [(page @ query.T).max(axis=0).mean() for page in pages]
        assert_close(result.scores, expected)
        assert result.tokens == len(query) + sum(map(len, pages))
        with pytest.raises(InvalidRequestError, match="reads texts as queries, and documents as"):
            await engine.rerank(RerankRequest("hybrid search", ["a document"]))
        pooled = partial(EmbedRequest, outputs=Outputs(colbert=True), colbert_pool_factor=2)
        await engine.embed(pooled(inputs_of(PICTURES)))
        with pytest.raises(InvalidRequestError, match="reads texts as queries, which need all of"):
            await engine.embed(pooled(["hybrid search", *inputs_of(PICTURES)]))


@pytest.fixture
def without_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers load a processor without its parts for video and sound."""
    for part in (AutoVideoProcessor, AutoFeatureExtractor):
        monkeypatch.setattr(part, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)


@pytest.mark.usefixtures("without_video")
@pytest.mark.parametrize("family", MESSAGES)
def test_messages_with_pictures_match_sentence_transformers(family, tmp_path) -> None:
    folder = save_messages(tmp_path / family, family)
    options = {"processor_kwargs": {"backend": "pil"}, "local_files_only": True}
    reference = SentenceTransformer(str(folder), device="cpu", **options)
    model = load(folder, max_length=400)
    assert (model.reads_images, model.normalizes, model.prompts) == (True, True, PROMPTS)
    items = [*MIXED, " a  b\n"]
    for prompt in ("", *PROMPTS.values()):
        expected = np.stack([reference.encode(item, prompt=prompt or None) for item in items])
        assert_close(embed(model, inputs_of(items), prompt), expected)
        alone = [embed(model, [item], prompt) for item in inputs_of(items)]
        assert_close(np.concatenate(alone), expected)


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory) -> Path:
    return save_messages(tmp_path_factory.mktemp("models") / "qwen3_vl", "qwen3_vl")


async def test_pictures_are_read_behind_prompts_and_counted(qwen3_vl) -> None:
    async with engine_on_cpu(qwen3_vl, embedding_cache_bytes=1 << 20) as engine:
        request = EmbedRequest(inputs_of(PICTURES[:1]))
        plain = await engine.embed(request)
        prompted = await engine.embed(replace(request, prompt_name="query"))
        (picture,) = load(qwen3_vl).tokenize(request.texts, PROMPTS["query"])
        assert prompted.tokens == len(picture.ids) > plain.tokens
        assert engine.cache is not None
        assert engine.cache.count == 2
        assert not np.allclose(plain.embeddings[0].dense, prompted.embeddings[0].dense)
        with pytest.raises(InvalidRequestError, match="at index 0: the model cannot read a pict"):
            await engine.embed(replace(request, prompt="<|image_pad|>"))


@pytest.mark.parametrize(("family", "count"), [("qwen3_vl", 104), ("colqwen2", 39)])
def test_a_picture_of_more_tokens_than_the_limit_is_refused(family, count, tmp_path) -> None:
    folder = (save_pages if family in PAGES else save_messages)(tmp_path / family, family)
    model: Any = load_embedder(family, folder, count - 1, float32())
    message = f"at index 1: the picture has {count} tokens, and {family} reads at most {count - 1}"
    with pytest.raises(InvalidRequestError, match=message):
        model.tokenize(inputs_of([PICTURES[1], draw_picture(160, 160)]))


def test_without_an_image_processor_the_texts_of_messages_are_served(qwen3_vl, tmp_path) -> None:
    folder = copytree(qwen3_vl, tmp_path / "qwen3_vl")
    (folder / "preprocessor_config.json").unlink()
    model = load(folder)
    assert not model.reads_images
    assert np.array_equal(embed(model, TEXTS), embed(load(qwen3_vl), TEXTS))


def test_the_vector_space_of_messages_covers_how_pictures_are_read(qwen3_vl, tmp_path) -> None:
    folder, space = copytree(qwen3_vl, tmp_path / "qwen3_vl"), load(qwen3_vl).spaces["dense"]
    change(folder / "preprocessor_config.json", image_mean=[0.4, 0.4, 0.4])
    assert load(folder).spaces["dense"] != space
    copytree(qwen3_vl, folder, dirs_exist_ok=True)
    with changed_weights(folder) as weights:
        weights["model.visual.merger.norm.weight"] += 1
    assert load(folder).spaces["dense"] != space
    copytree(qwen3_vl, folder, dirs_exist_ok=True)
    assert load(folder).spaces["dense"] == space


def test_a_template_without_pictures_is_refused(qwen3_vl, tmp_path) -> None:
    folder = copytree(qwen3_vl, tmp_path / "qwen3_vl")
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|image_pad|>", ""))
    with pytest.raises(StartupError, match="the processor in .* cannot read a picture: The total"):
        load(folder)


def test_a_long_query_keeps_the_tokens_around_it(tmp_path) -> None:
    model: Any = load_embedder("colqwen2", save_pages(tmp_path, "colqwen2"), 64, float32())
    short, long = model.tokenize(["vector", "vector " * 90])
    assert len(long.ids) == 64
    assert long.truncated
    assert not short.truncated
    assert np.array_equal(long.ids[-11:], short.ids[-11:])


def test_pictures_of_clip_match_sentence_transformers(clip) -> None:
    reference = SentenceTransformer(str(clip), device="cpu", local_files_only=True)
    expected = np.stack([reference.encode(item) for item in (*TEXTS[:2], *PICTURES)])
    assert_close(embed(load(clip), inputs_of([*TEXTS[:2], *PICTURES])), expected)


def test_a_checkpoint_of_sentence_transformers_with_clip_is_loaded(clip, tmp_path) -> None:
    reference = SentenceTransformer(str(clip), device="cpu", local_files_only=True)
    reference.save_pretrained(str(tmp_path / "saved"))
    expected = np.stack([reference.encode(item) for item in PICTURES])
    assert_close(embed(load(tmp_path / "saved"), inputs_of(PICTURES)), expected)


async def test_the_engine_counts_tokens_and_caches_a_picture(clip) -> None:
    async with engine_on_cpu(clip, embedding_cache_bytes=1 << 20) as engine:
        request = EmbedRequest(inputs_of(MIXED))
        first = await engine.embed(request)
        assert first.tokens == 6 + 2 + POSITIONS + 3 * 17
        assert engine.cache is not None
        assert engine.cache.count == len(MIXED)
        again = await engine.embed(request)
        assert again.timings.inference == 0
        assert again.tokens == first.tokens
        for one, other in zip(first.embeddings, again.embeddings, strict=True):
            assert np.array_equal(one.dense, other.dense)


async def test_a_picture_that_cannot_be_used_is_named_by_its_index(clip) -> None:
    async with engine_on_cpu(clip) as engine:
        with pytest.raises(InvalidRequestError, match="the input at index 1: the picture is none"):
            await engine.embed(EmbedRequest(["text", ImageInput(b"<svg/>")]))


async def test_the_arrays_of_pictures_are_reserved_with_the_response(clip) -> None:
    arrays = 3 * 32 * 32 * 4
    async with engine_on_cpu(clip) as engine:
        request = EmbedRequest(inputs_of(["text", PICTURES[0], PICTURES[1]]))
        memory = AnswerMemory(2 * arrays + 40_000)
        await engine.embed(replace(request, answer=memory))
        assert memory.held > 2 * arrays
        # The second picture may be decoded, but not all be held until the response is sent.
        memory = AnswerMemory(2 * arrays)
        with pytest.raises(InvalidRequestError, match="of these 3 texts and pictures need"):
            await engine.embed(replace(request, answer=memory))


async def test_a_model_for_texts_alone_refuses_pictures(tiny_m3) -> None:
    async with engine_on_cpu(tiny_m3) as engine:
        with pytest.raises(InvalidRequestError, match="reads no pictures: send texts"):
            await engine.embed(EmbedRequest(["text", input_of(PICTURES[0])]))


def test_the_vector_space_depends_on_the_image_processor(clip, tmp_path) -> None:
    space = load(clip).spaces["dense"]
    change(clip / "preprocessor_config.json", image_mean=[0.4, 0.4, 0.4])
    assert load(clip).spaces["dense"] != space


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "cannot load the image"),
        (
            lambda folder: change(folder / "tokenizer_config.json", padding_side="left"),
            "fills up texts on the left",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}", "utf-8"),
            "transformers cannot load the tokenizer in",
        ),
        (
            lambda folder: change(
                folder / "preprocessor_config.json", size={"height": 48, "width": 48}
            ),
            "cannot read a picture as its image processor makes it",
        ),
    ],
)
def test_an_unusable_checkpoint_is_refused(damage, message, tmp_path) -> None:
    folder = save_image_text(tmp_path / "siglip", "siglip")
    damage(folder)
    with pytest.raises(StartupError, match=message):
        load(folder)
