"""Every model answers to each of its names, and to no other's."""

import pytest

from smart_embedder.api.catalogue import ModelCatalogue, Role
from smart_embedder.errors import StartupError, UnknownModelError
from smart_embedder.settings import Settings
from smart_embedder.settings.types import ModelEntry

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


def further(*entries: dict[str, object], **settings: object) -> ModelCatalogue:
    """With these models of MODELS."""
    return catalogue(models=[ModelEntry(**each) for each in entries], **settings)


JUDGE = {"name": "own/judge", "task": "rerank", "aliases": ["Other", "judge"]}


def test_a_model_of_models_has_the_names_of_its_entry_and_is_found_by_its_task() -> None:
    served = further({"name": "own/e5", "revision": "abc"}, JUDGE)
    assert served.created > 0
    embedder, reranker = served.models[-2:]
    assert (embedder.names, embedder.revision) == (("own/e5", "e5", "e5-embed"), "abc")
    assert (reranker.names, reranker.revision) == (("own/judge", "judge", "Other"), None)
    assert (embedder.role, reranker.role) == (Role.EMBEDDER, Role.RERANKER)
    assert embedder.further
    assert reranker.further
    assert served.embedder("E5").name == "own/e5"
    assert served.reranker("other").name == "own/judge"
    assert served.find("own/judge") is reranker
    # Without a name it is the default one still.
    assert (served.embedder(None).name, served.reranker(None).name) == (BGE, RERANKER)


def test_each_default_model_has_a_role() -> None:
    served = further({"name": "own/e5"}, JUDGE, dense_embedding_model=QWEN)
    assert [each.name for each in served.models if not each.further] == [BGE, QWEN, RERANKER]
    assert served.with_role(Role.EMBEDDER).name == BGE
    assert served.with_role(Role.DENSE).name == QWEN
    assert served.with_role(Role.RERANKER).name == RERANKER
    scoring = [each.name for each in served.models if served.reranks(each)]
    assert scoring == [RERANKER, "own/judge"]


def test_a_further_reranker_is_found_by_name_where_there_is_no_default_one() -> None:
    served = further(JUDGE, reranker_model="none")
    assert served.reranker(None) is None
    assert served.reranker("Other").name == "own/judge"
    with pytest.raises(UnknownModelError, match="the rerankers are own/judge, judge, Other"):
        served.reranker(RERANKER)


def test_in_late_interaction_an_embedder_of_models_reranks_nothing() -> None:
    served = further({"name": "own/e5"}, JUDGE, reranker_model="late-interaction")
    assert served.reranker(None).name == BGE
    assert [each.name for each in served.models if served.reranks(each)] == [BGE, "own/judge"]


@pytest.mark.parametrize(
    "entry",
    [
        {"name": BGE},
        {"name": "own/bge", "aliases": ["free", "BGE-m3"]},
        {"name": "own/bge-m3-embed", "aliases": ["bge-m3-embed"]},
    ],
)
def test_a_model_of_models_may_not_have_a_name_of_a_default_one(entry) -> None:
    with pytest.raises(StartupError, match="MODELS: .* is a name of a model that has a setting"):
        further(entry)


def test_each_default_model_has_the_revision_of_its_own_setting() -> None:
    served = catalogue(
        dense_embedding_model=QWEN,
        model_revision="one",
        dense_model_revision="two",
        reranker_model_revision="three",
    )
    assert [each.revision for each in served.models] == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["\N{LATIN SMALL LIGATURE FFI}", "\N{LATIN SMALL LETTER SHARP S}"])
def test_upper_and_lower_case_are_one_name_in_any_script(name: str) -> None:
    """Three letters may be one where case does not count."""
    served = catalogue(model_aliases=f"{name}={BGE}")
    assert served.find(name.casefold()).name == BGE
    long = catalogue(model_aliases=f"{name.casefold() * 20}={BGE}")
    assert long.find(name * 20).name == BGE
