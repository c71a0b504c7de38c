"""Which settings an engine is tried with."""

import pytest

from benchmarks.adapters.interface import Setting, by_length
from benchmarks.catalogue import CATALOGUE
from benchmarks.workload import WORKLOADS


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_engine_has_a_setting_for_every_workload(name: str, workload) -> None:
    settings = CATALOGUE[name].settings_for(workload, texts=4)
    assert settings
    assert all((each.batch or 1) <= min(workload.largest_batch, 4) for each in settings)


def test_one_query_at_a_time_leaves_nothing_to_choose() -> None:
    for contender in CATALOGUE.values():
        assert len(contender.settings_for(WORKLOADS["one-query"], 64)) == 1


def test_a_setting_says_what_it_is() -> None:
    assert str(Setting()) == "default"
    assert str(Setting(8, "throughput")) == "batch 8 throughput"


def test_batches_hold_texts_of_near_equal_length_and_each_text_once() -> None:
    texts = ["aa", "a" * 9, "a", "a" * 8, "aaa"]
    assert list(by_length(texts, 2)) == [[1, 3], [4, 0], [2]]
