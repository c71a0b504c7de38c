"""Room for a model: who is unloaded, who gives way and when, on a clock that skips the waiting."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from smart_embedder.engine.model import MemoryUsage
from smart_embedder.engine.model_pool import PAUSE, ModelPool
from smart_embedder.engine.scheduling.admission import Abortable
from smart_embedder.errors import LoadingError, MemoryTakenError, ModelTooLargeError
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings.engine import EngineSettings, ModelEntry
from tests.engine.devices.virtual_device import VirtualThread
from tests.engine.fakes import NO_MORE, FakeModel, loaded, placed
from tests.support.skipped_time import in_skipped_time, now, turns

GIGABYTE = 10**9
LONGEST_TURN = 20.0


@pytest.fixture(autouse=True)
def virtual(monkeypatch) -> None:
    """Reading the memory takes no thread."""

    async def at_once(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


class Machine:
    """Memories of some gigabytes, their models, and the devices that may be using some."""

    def __init__(self, gigabytes: float = 3, threshold: float = 1.0, **pinned: bool) -> None:
        self.total = int(gigabytes * GIGABYTE)
        self.of_others = self.garbage = 0
        names = ("one", "two", "three", "new")
        entries = [ModelEntry(name=name, pinned=pinned.get(name, False)) for name in names]
        settings = EngineSettings(models=entries, model_memory_threshold=threshold)
        pool: Any = ModelPool(
            settings,
            lambda _: NO_MORE,
            self,  # type: ignore[arg-type]
            Metrics(),
            Abortable(),
            request_timeout=4 * LONGEST_TURN,
        )
        pool._loader, pool._thread = self, VirtualThread()
        self.pool, self.models = pool, pool._models
        for model in self.models.values():
            model.needs = {"memory": GIGABYTE}
        self.computing: set[str] = set()
        self.unloaded: list[str] = []
        self.freed = 0

    def read_memory(self, name: str) -> MemoryUsage:
        assert name == "memory"
        held = (each.nbytes for each in self.models.values() if each.placed is not None)
        own = sum(held) + self.garbage
        return MemoryUsage(own + self.of_others, self.total, own)

    def is_using(self, model: Any) -> bool:
        return model.name in self.computing

    def remove(self, model: Any) -> None:
        self.unloaded.append(model.name)

    def free_memory(self) -> None:
        self.freed += 1
        self.garbage = 0

    def load(self, *names: str, seconds: float = 0.0) -> None:
        """Loaded one after the other, in so many seconds each."""
        loop: Any = asyncio.get_running_loop()
        for name in names:
            self.models[name].begin()
            loop.skip(seconds)
            fake = FakeModel()
            fake.name = name
            self.models[name].succeed(placed([(loaded(fake).device, fake)]), 10)
            loop.skip(0.001)

    def lease(self, name: str) -> Callable[[], None]:
        """A request uses it; what is returned ends that."""
        model = self.models[name]
        model.leases, model.users = model.leases + 1, model.users + 1

        def end() -> None:
            model.leases, model.users, model.last_used = model.leases - 1, model.users - 1, now()
            self.pool._lease_ended.set()

        return end

    def make(self, *, waited_for: bool = True) -> "asyncio.Task[None]":
        """Make room for the new one."""
        if waited_for:
            self.models["new"].leases = 1
        return asyncio.create_task(self.pool._make_room(self.models["new"]))


def keeps_garbage(machine: Machine) -> None:
    machine.garbage = GIGABYTE // 2


def needs_two(machine: Machine) -> None:
    machine.models["one"].last_used = now() + 1
    machine.models["new"].needs = {"memory": 2 * GIGABYTE}


def computes_two(machine: Machine) -> None:
    machine.computing.add("two")


def promises_one_and_leases_two(machine: Machine) -> None:
    machine.models["one"].promise(10)
    machine.lease("two")


@pytest.mark.parametrize(
    ("options", "names", "change", "unloaded"),
    [
        ({}, "one two", None, []),
        # There is no room above the threshold.
        ({"threshold": 0.9}, "one two", None, ["one"]),
        # What allocators keep is freed before a model is unloaded.
        ({}, "one two", keeps_garbage, []),
        # The least recently used, and no more than needed.
        ({}, "one two three", needs_two, ["two", "three"]),
        # Neither a pinned one nor one in work.
        ({"one": True}, "one two three", computes_two, ["three"]),
        ({}, "one two three", promises_one_and_leases_two, ["three"]),
    ],
)
@in_skipped_time
async def test_idle_models_make_room_at_once(options, names, change, unloaded) -> None:
    machine = Machine(**options)
    machine.load(*names.split())
    if change:
        change(machine)
    began = now()
    await machine.make()
    assert machine.unloaded == unloaded
    is_freed = bool(unloaded) or change is keeps_garbage
    assert bool(machine.freed) == is_freed
    assert now() - began < 0.1


@pytest.mark.parametrize("is_leased", [True, False])
@in_skipped_time
async def test_the_end_of_a_lease_is_seen_at_once_and_that_of_a_leavers_batch_soon(
    is_leased: bool,
) -> None:
    machine = Machine(gigabytes=1)
    machine.load("one", seconds=1000.0)
    machine.computing.add("one")
    end = machine.lease("one") if is_leased else machine.computing.clear
    making = machine.make()
    # Beyond the one look after the pause for what a request that has just ended still holds.
    await asyncio.sleep(3.3 * PAUSE)
    assert not making.done()
    machine.computing.clear()
    end()
    await (turns() if is_leased else asyncio.sleep(1.1 * PAUSE))
    assert making.done()
    assert machine.unloaded == ["one"]


@pytest.mark.parametrize(("seconds", "turn"), [(0.1, 2.0), (3.0, 12.0), (100.0, LONGEST_TURN)])
@in_skipped_time
async def test_a_busy_model_gives_way_after_its_turn_to_one_that_is_waited_for(
    seconds, turn
) -> None:
    """Four times its loading, two seconds at least, and not longer than the others can wait."""
    machine = Machine(gigabytes=1)
    machine.load("one", seconds=seconds)
    began = now()
    machine.lease("one")
    making = machine.make()
    gives_way = machine.models["one"]
    while not gives_way.gives_way:
        await asyncio.sleep(0.05)
        # Those who are told to come back are told of the turn, too.
        if now() - began > PAUSE + 0.2 and not gives_way.gives_way:
            left = turn - (now() - began)
            told = machine.pool._seconds_left(machine.models["new"])
            assert told == pytest.approx(left + 5, abs=0.2)
    assert now() - began == pytest.approx(turn, abs=0.2)
    making.cancel()


@in_skipped_time
async def test_of_busy_models_that_gives_way_whose_turn_is_over_first() -> None:
    machine = Machine(gigabytes=2)
    machine.load("one", seconds=4.0)
    machine.load("two", seconds=1.0)
    machine.lease("one")
    end = machine.lease("two")
    making = machine.make()
    await asyncio.sleep(6)
    assert [each.gives_way for each in machine.models.values()] == [False, True, False, False]
    end()
    await making
    assert machine.unloaded == ["two"]
    assert not machine.models["two"].gives_way


@in_skipped_time
async def test_for_what_nobody_waits_for_no_busy_model_gives_way() -> None:
    machine = Machine(gigabytes=1)
    machine.load("one")
    machine.lease("one")
    with pytest.raises(LoadingError, match="the memory for the model new is in use by one"):
        await machine.make(waited_for=False)
    assert not machine.models["one"].gives_way


@pytest.mark.parametrize(
    ("of_others", "needed", "refusal"),
    [(0, 4, ModelTooLargeError), (2, 2, MemoryTakenError), (2, 4, ModelTooLargeError)],
)
@in_skipped_time
async def test_where_no_waiting_helps_it_is_refused_and_nothing_unloaded(
    of_others: int, needed: int, refusal: type[Exception]
) -> None:
    """Unless other programs could leave what is missing, it is too large for ever."""
    machine = Machine(gigabytes=3)
    machine.load("one")
    machine.of_others = of_others * GIGABYTE
    machine.models["new"].needs = {"memory": needed * GIGABYTE}
    began = now()
    if refusal is MemoryTakenError:
        machine.models["one"].needs = {"memory": GIGABYTE // 2}
    with pytest.raises(refusal) as refused:
        await machine.make()
    assert machine.unloaded == []
    # What a request that has just ended still holds is waited for, once.
    assert now() - began == pytest.approx(PAUSE, abs=0.1)
    assert machine.freed == 2
    said = str(refused.value)
    assert f"needs {needed}.0 GB of the memory of memory" in said
    if refusal is MemoryTakenError:
        # A tenth of the whole is the system's own.
        assert "of which other programs hold 1.7 GB" in said
    else:
        assert f"at most {3 - of_others}.0 GB can be had" in said


@in_skipped_time
async def test_what_a_request_that_has_just_ended_holds_is_waited_for() -> None:
    machine = Machine(gigabytes=2, one=True)
    machine.load("one")
    machine.of_others = GIGABYTE // 2
    making = machine.make()
    await asyncio.sleep(PAUSE / 2)
    machine.of_others = 0
    await making


@in_skipped_time
async def test_memory_above_the_threshold_is_got_from_idle_models_alone() -> None:
    machine = Machine(gigabytes=3)
    machine.load("one", "two", "three")
    machine.garbage = GIGABYTE
    await machine.pool._relieve()
    assert (machine.unloaded, machine.freed) == ([], 1)
    machine.of_others = GIGABYTE // 2
    machine.computing.add("one")
    await machine.pool._relieve()
    assert machine.unloaded == ["two"]
    machine.of_others = 3 * GIGABYTE
    machine.lease("three")
    await machine.pool._relieve()
    assert machine.unloaded == ["two"]


@in_skipped_time
async def test_who_is_waited_for_until_it_is_idle_has_its_requests_first() -> None:
    machine = Machine()
    machine.load("one")
    model = machine.models["one"]
    model.leases = 1  # It has waited for the loading, and is about to have it.
    waits = asyncio.create_task(machine.pool.unload("one"))
    await asyncio.sleep(5 * PAUSE)
    assert not waits.done()
    model.leases = 0
    end = machine.lease("one")
    await asyncio.sleep(5 * PAUSE + 0.3)
    assert not waits.done()
    end()
    await waits
    assert machine.unloaded == ["one"]


@in_skipped_time
async def test_who_waits_is_cancelled_also_at_the_moment_at_which_a_lease_ends() -> None:
    machine = Machine(gigabytes=1)
    machine.load("one")
    machine.lease("one")
    making = machine.make()
    waiting = asyncio.create_task(machine.pool.unload("one"))
    await asyncio.sleep(1.5 * PAUSE)
    machine.pool._lease_ended.set()
    for each in (making, waiting):
        each.cancel()
    await turns()
    assert making.cancelled()
    assert waiting.cancelled()


@in_skipped_time
async def test_the_time_until_a_model_is_loaded_is_that_of_those_before_it_and_of_the_room() -> (
    None
):
    machine = Machine()
    one, two, new = (machine.models[name] for name in ("one", "two", "new"))
    left = machine.pool._seconds_left
    assert left(new) == 5, "200 MB a second"
    machine.pool._to_load += [one, two, new]
    one.begin()
    await asyncio.sleep(3)
    assert [left(each) for each in (one, two, new)] == pytest.approx([2, 7, 12], abs=0.01)
    machine.pool._bytes_per_second = GIGABYTE / 2
    machine.pool._to_load.remove(one)
    machine.pool._room_at = now() + 3
    assert [left(each) for each in (two, new)] == pytest.approx([5, 7], abs=0.01)
    machine.pool._room_at = now()
    assert left(new) == 4
