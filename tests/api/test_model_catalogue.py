"""Every model answers to each of its names, and to no other's."""

import pytest

from app.api.model_catalogue import ModelCatalogue
from app.errors import StartupError, UnknownModelError
from app.settings import Settings

BGE, QWEN = "BAAI/bge-m3", "Qwen/Qwen3-Embedding-0.6B"
RERANKER = "BAAI/bge-reranker-v2-m3"


def catalogue(**settings) -> ModelCatalogue:
    return ModelCatalogue(Settings(**settings))


def test_a_model_answers_to_its_id_its_last_part_and_an_alias_with_embed() -> None:
    embedder, reranker = catalogue().models
    assert embedder.names == (BGE, "bge-m3", "bge-m3-embed")
    assert reranker.names == (RERANKER, "bge-reranker-v2-m3")
    for name in ("baai/BGE-M3", "BGE-M3", "bge-m3-EMBED"):
        assert catalogue().embedder(name).name == BGE


def test_a_name_with_embed_in_it_needs_no_other() -> None:
    dense = catalogue(dense_embedding_model=QWEN).models[1]
    assert dense.names == (QWEN, "Qwen3-Embedding-0.6B")


def test_without_a_name_it_is_the_dense_model_and_the_reranker() -> None:
    for name in (None, ""):
        assert catalogue().embedder(name).name == BGE
        assert catalogue(dense_embedding_model=QWEN).embedder(name).name == QWEN
        assert catalogue().reranker(name).name == RERANKER


def test_bge_m3_is_its_own_reranker_in_late_interaction() -> None:
    served = catalogue(reranker_model="late-interaction")
    assert served.reranker("bge-m3").name == BGE
    assert [model.name for model in served.models] == [BGE]


def test_there_may_be_no_reranker() -> None:
    assert catalogue(reranker_model="none").reranker("anything") is None


def test_a_model_of_another_kind_is_as_unknown_as_one_of_no_kind() -> None:
    for find, name in (("embedder", RERANKER), ("reranker", BGE), ("find", "gpt-4")):
        with pytest.raises(UnknownModelError, match=f"the model {name} is not served here"):
            getattr(catalogue(), find)(name)


def test_a_folders_path_is_no_name() -> None:
    served = catalogue(embedding_model="/models/private/mine")
    assert served.models[0].names == ("mine", "mine-embed")
    with pytest.raises(UnknownModelError):
        served.embedder("/models/private/mine")


def test_aliases_add_names_to_whatever_name_they_point_to() -> None:
    served = catalogue(model_aliases="text-embedding-3-small = bge-M3, rerank-v3.5=" + RERANKER)
    assert served.embedder("Text-Embedding-3-Small").name == BGE
    assert served.reranker("rerank-v3.5").name == RERANKER


def test_an_alias_of_what_is_not_served_stops_the_start() -> None:
    with pytest.raises(StartupError, match="MODEL_ALIASES=small=bge-large is not allowed"):
        catalogue(model_aliases="small=bge-large")
