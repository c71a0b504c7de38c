"""How long a forward may take: set, by default, or as the probe predicts."""

import numpy as np
import pytest

from app.engine.devices.forward_limit import ForwardLimit
from app.engine.scheduling.batch import Batch, BatchSlice
from app.engine.scheduling.job import Job
from app.engine.types import Outputs
from tests.engine.fakes import FakeModel


def batch_of(tokens: int, time_limit: float | None = None, spent: float = 0.0) -> Batch:
    sequences = [np.zeros(tokens, np.int64)]
    outputs = Outputs(dense=True)
    job = Job(FakeModel(), sequences, outputs, time_limit=time_limit, time_spent=spent)
    return Batch(job.model, [BatchSlice(job, 0, 1)])


def test_what_was_set_holds_whatever_the_probe_says() -> None:
    limit = ForwardLimit(2.0, least=30.0, seconds_per_token=1.0)
    assert limit.of_batch(batch_of(100)) == 2.0


def test_unset_it_grows_to_five_times_the_predicted_time() -> None:
    limit = ForwardLimit(None, least=30.0, seconds_per_token=0.01)
    assert limit.of_batch(batch_of(100)) == 30.0
    assert limit.of_batch(batch_of(1024)) == pytest.approx(5 * 10.24 * 1.5)


def test_a_long_sequence_is_given_the_time_that_its_attention_takes() -> None:
    limit = ForwardLimit(None, least=0.0, seconds_per_token=0.01)
    short = [batch_of(512) for _ in range(16)]
    assert limit.of_batch(batch_of(8192)) > 3 * sum(map(limit.of_batch, short))


def test_a_request_with_a_limit_of_its_own_is_held_to_what_is_left_of_it() -> None:
    limit = ForwardLimit(2.0, least=30.0)
    batch = batch_of(10, time_limit=60.0, spent=45.0)
    assert limit.split(batch).slices == [15.0]


def test_a_request_that_has_little_time_left_does_not_make_the_device_look_stuck() -> None:
    limit = ForwardLimit(2.0, least=30.0)
    batch = batch_of(10, time_limit=60.0, spent=59.9)
    assert limit.split(batch).device == 60.0
    assert limit.split(batch_of(10)).device == 2.0
