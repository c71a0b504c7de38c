"""Every model is found by each of its names, and by no other."""

import pytest

from app.catalogue import ModelCatalogue, Role
from app.errors import UnknownModelError
from app.settings import Settings
from smart_embedder.errors import StartupError
from smart_embedder.settings import ModelEntry

BGE, QWEN = "BAAI/bge-m3", "Qwen/Qwen3-Embedding-0.6B"
RERANKER = "BAAI/bge-reranker-v2-m3"
E5 = {"name": "own/e5", "revision": "abc"}
JUDGE = {"name": "own/judge", "task": "rerank", "aliases": ["Other", "judge"]}
FURTHER = [ModelEntry(**E5), ModelEntry(**JUDGE)]
LATE, NONE = {"reranker_model": "late-interaction"}, {"reranker_model": "none"}
ALIASES = {"model_aliases": f"text-embedding-3-small = bge-M3, rerank-v3.5={RERANKER}"}
FFI, SHARP_S = "\N{LATIN SMALL LIGATURE FFI}", "\N{LATIN SMALL LETTER SHARP S}"


def catalogue(**settings) -> ModelCatalogue:
    return ModelCatalogue(Settings(**settings))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            {},
            [(BGE, "bge-m3", "bge-m3-embed"), (RERANKER, "bge-reranker-v2-m3")],
        ),
        # A name that contains `embed` needs no further alias.
        (NONE | {"dense_embedding_model": QWEN}, [
            (BGE, "bge-m3", "bge-m3-embed"), (QWEN, "Qwen3-Embedding-0.6B"),
        ]),
        (LATE, [(BGE, "bge-m3", "bge-m3-embed")]),
        (LATE | {"embedding_model": "/models/private/mine"}, [("mine", "mine-embed")]),
        (LATE | {"embedding_model": "own/embedder", "models": FURTHER}, [
            ("own/embedder", "embedder"), ("own/e5", "e5", "e5-embed"),
            ("own/judge", "judge", "Other"),
        ]),
    ],
    ids=["defaults", "a dense model", "late interaction", "a folder", "models of MODELS"],
)  # fmt: skip
def test_a_model_has_its_hub_id_its_last_part_and_an_alias_with_embed(settings, names) -> None:
    assert [model.names for model in catalogue(**settings).models] == names


@pytest.mark.parametrize(
    ("settings", "find", "name", "found"),
    [
        *(({}, "embedder", name, BGE) for name in ("baai/BGE-M3", "BGE-M3", "bge-m3-EMBED")),
        ({}, "embedder", "", BGE),
        ({}, "reranker", None, RERANKER),
        ({"dense_embedding_model": QWEN}, "embedder", None, QWEN),
        (LATE, "reranker", "bge-m3", BGE),
        (NONE, "reranker", "anything", None),
        (ALIASES, "embedder", "Text-Embedding-3-Small", BGE),
        (ALIASES, "reranker", "rerank-v3.5", RERANKER),
        ({"models": FURTHER}, "embedder", "E5", "own/e5"),
        ({"models": FURTHER}, "reranker", "other", "own/judge"),
        ({"models": FURTHER}, "find", "own/judge", "own/judge"),
        # Without a name, the default model is used, if there is one.
        ({"models": FURTHER} | NONE, "reranker", None, None),
        ({"models": FURTHER} | NONE, "reranker", "Other", "own/judge"),
        # Case is ignored in any script; folding may make three letters of one.
        *(
            ({"model_aliases": f"{name.casefold() * 20}={BGE}"}, "find", name * 20, BGE)
            for name in (FFI, SHARP_S)
        ),
    ],
)
def test_a_model_is_found_by_any_of_its_names_in_any_case(settings, find, name, found) -> None:
    model = getattr(catalogue(**settings), find)(name)
    assert (model and model.name) == found


@pytest.mark.parametrize(
    ("settings", "find", "name", "message"),
    [
        ({}, "embedder", RERANKER, f"the model {RERANKER} is not served here"),
        ({}, "find", "gpt-4", "the model gpt-4 is not served here"),
        # The path of a folder is not a name.
        ({"embedding_model": "/models/mine"}, "embedder", "/models/mine", "is not served here"),
        ({"models": FURTHER} | NONE, "reranker", RERANKER, "the rerankers are own/judge, judge, O"),
    ],
)
def test_a_model_with_another_task_is_as_unknown_as_any_other_name(
    settings, find, name, message
) -> None:
    with pytest.raises(UnknownModelError, match=message):
        getattr(catalogue(**settings), find)(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_aliases": "small=bge-large"}, "MODEL_ALIASES=small=bge-large is not allowed"),
        # With one name, a client could get the vectors of either.
        (
            {"embedding_model": "/a/mine", "dense_embedding_model": "/b/mine"},
            "EMBEDDING_MODEL and DENSE_EMBEDDING_MODEL have one name, mine: rename a folder",
        ),
        *(
            ({"models": [ModelEntry(**entry)]}, "MODELS: .* is already a name of a default model")
            for entry in (
                {"name": BGE},
                {"name": "own/bge", "aliases": ["free", "BGE-m3"]},
                {"name": "own/bge-m3-embed", "aliases": ["bge-m3-embed"]},
            )
        ),
    ],
)
def test_an_alias_of_no_model_and_a_name_of_two_models_stop_the_start(settings, message) -> None:
    with pytest.raises(StartupError, match=message):
        catalogue(**settings)


def test_each_model_has_its_role_and_the_revision_of_its_setting() -> None:
    revisions = {"model_revision": "one", "dense_model_revision": "two"}
    revisions |= {"reranker_model_revision": "three", "dense_embedding_model": QWEN}
    served = catalogue(models=FURTHER, **revisions)
    assert served.created > 0
    assert [
        (model.name, model.role, model.revision, model.from_models_file) for model in served.models
    ] == [
        (BGE, Role.EMBEDDER, "one", False),
        (QWEN, Role.DENSE, "two", False),
        (RERANKER, Role.RERANKER, "three", False),
        ("own/e5", Role.EMBEDDER, "abc", True),
        ("own/judge", Role.RERANKER, None, True),
    ]
    for role, name in ((Role.EMBEDDER, BGE), (Role.DENSE, QWEN), (Role.RERANKER, RERANKER)):
        assert served.with_role(role).name == name


@pytest.mark.parametrize(
    ("settings", "scoring"), [({}, [RERANKER, "own/judge"]), (LATE, [BGE, "own/judge"])]
)
def test_an_embedder_of_models_reranks_nothing(settings, scoring) -> None:
    served = catalogue(models=FURTHER, **settings)
    assert [model.name for model in served.models if served.reranks(model)] == scoring
