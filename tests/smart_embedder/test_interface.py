"""Memory usage, abilities of models, loaded models, and reserved memory."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from smart_embedder.errors import InvalidRequestError
from smart_embedder.interface import MemoryUsage, ModelAbilities
from smart_embedder.requests import UNLIMITED, AnswerMemory, Outputs
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded

GIGABYTE = 2**30


@pytest.mark.parametrize(
    ("used", "own", "of_others"),
    [(8, 3, 4), (8, None, 0), (3, 3, 0), (2, 3, 0), (10, 0, 9)],
)
def test_memory_of_other_programs_excludes_that_of_the_system(used, own, of_others):
    usage = MemoryUsage(used * GIGABYTE, 64 * GIGABYTE, None if own is None else own * GIGABYTE)
    assert usage.of_others == of_others * GIGABYTE


def test_the_system_uses_a_tenth_of_a_small_memory() -> None:
    assert MemoryUsage(900, 1000, 100).of_others == 700


def test_the_kinds_of_a_dense_model_and_an_embedder_together() -> None:
    embedder, dense, reranker = FakeModel(), FakeModel(), FakeReranker()
    embedder.kinds = Outputs(dense=True, sparse=True)
    dense.kinds = Outputs(dense=True, colbert=True)
    alone = loaded(embedder)
    assert (alone.dense_model, alone.kinds) == (embedder, Outputs(dense=True, sparse=True))
    both = replace(alone, dense=dense, reranker=reranker)
    assert both.dense_model is dense
    assert both.kinds == Outputs(dense=True, sparse=True)


def test_memory_is_summed_over_all_devices_that_report_it() -> None:
    models = loaded(FakeModel())
    memory = {"free": 5, "total": 9}
    device = replace(models.device, read_memory=memory.__getitem__)
    both = replace(models, devices=(models.device, device, device))
    assert (models.read_memory("free"), both.read_memory("total")) == (0, 18)


def test_an_answer_reserves_its_largest_size() -> None:
    answer = AnswerMemory(100)
    assert answer.allowed == 100
    for size in (60, 40):
        answer.reserve(size, "vectors", "less")
    answer.reserve_more(40, "tokens", "less")
    with pytest.raises(
        InvalidRequestError, match="tokens need 101 bytes, and this answer may hold"
    ):
        answer.reserve_more(1, "tokens", "less")
    with pytest.raises(InvalidRequestError):
        answer.check(101, "vectors", "less")
    UNLIMITED.check(10**15, "vectors", "less")


def test_abilities_of_an_embedder() -> None:
    model = FakeModel()
    model.kinds = Outputs(dense=True, colbert=True)
    abilities = ModelAbilities.of(model, "embed")
    assert abilities == ModelAbilities(("dense", "colbert"), (), 100)
    model.prompts = MappingProxyType({"passage": "p: "})
    assert ModelAbilities.of(model, "embed").input_types == ("document",)
    model.reads_input_type = True
    assert ModelAbilities.of(model, "embed").input_types == ("query", "document")
