"""The auditor: it watches the engine and checks the laws in `LAWS`.

It keeps its own records, reads the state of the engine, and never changes it. It sees each job that
enters the queue, each batch that is taken, each forward on a device, each outcome of a request, and
every moment at which time is about to pass because there is nothing else to do.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from smart_embedder.core import EngineCore
from smart_embedder.devices.executor import DeviceExecutor
from smart_embedder.devices.forward_limits import CPU_SECONDS, GPU_SECONDS
from smart_embedder.errors import InferenceTimeoutError
from smart_embedder.interface import Model
from smart_embedder.requests import Purpose
from smart_embedder.scheduling.admission import ConcurrencyLimit
from smart_embedder.scheduling.batcher import (
    BULK_WEIGHT,
    INTERACTIVE_WEIGHT,
    Batch,
    LimitsOf,
)
from smart_embedder.scheduling.job import Job, JobState
from smart_embedder.scheduling.queue import JobQueue
from smart_embedder.settings import EngineSettings
from smart_embedder.tokens import JoinedIds, TokenSequence, join
from tests.simulation.fakes import MOST_TOKENS, FakeDevice, Forward
from tests.simulation.virtual_time import VirtualLoop

LAWS: Final = {
    "once": "a job has one outcome, and a request ends once, within REQUEST_TIMEOUT",
    "own": "a request gets the results of its own texts and models, or its own error",
    "class share": "while both classes wait, bulk gets a fifth, give or take two forwards",
    "share": "two clients that both wait get equal shares, give or take two forwards",
    "job share": "two requests of a client get equal shares, give or take two forwards",
    "turnover": "a waiting node gets its share of its group, however many others come and go",
    "work": "no device is idle while a request waits for it",
    "lost": "a sequence that was taken is on a device, or its request has an outcome",
    "order": "sequences are taken once, in order, and only of requests that wait",
    "budget": "no forward exceeds its limits of tokens, sequences or requests",
    "halves": "a batch that ran out of memory is run in halves, and its token budget is halved",
    "leavers": "no forward, or half of one, begins for a request that has an outcome",
    "deadline": "a forward fails its requests at its time limit, neither earlier nor later",
    "failed device": "a failed device gets no forward, and no batch that crashed it is handed over",
    "place": "a client's only request is refused for lack of permits only if none is free",
    "retry": "Retry-After is between 1 and 30 seconds",
    "time": "clocks never fall while a job waits",
    "preemption": "preempting jobs are short, of no lower class, and no longer than the forward",
    "lease": "no leased model is unloaded, and no model is unloaded while a job needs it",
    "memory": "models use no more memory than MODEL_MEMORY_THRESHOLD allows",
    "zero": "without requests nothing is held: permits, tasks, leases, clients",
    "again": "after a fault, once nothing goes wrong any more, every model serves",
    "drain": "requests accepted before SIGTERM are answered, and the drain ends in time",
    "silence": "no error is left unhandled",
}

OWNER: "ContextVar[RequestBook | None]" = ContextVar("owner", default=None)
# Times that differ by fewer virtual seconds are equal.
_MOMENT = 1e-6
# The tolerance of sums that are added in different orders.
_ROUNDING = 1e-6
_MAX_PREEMPTING_TOKENS = 256
# Forwards that a node may be owed; 1.3 were seen.
_MAX_OWED_FORWARDS = 3
# Shares of jobs are compared only for clients with at most so many.
_MAX_WATCHED_JOBS = 6
# The length at which the engine predicts that a token takes twice as long.
_DOUBLED_LENGTH = 2048
# The faults of forwards that still give results.
_RETURNS: Final = frozenset({None, "long", "overdue", "not_finite"})


class LawBrokenError(AssertionError):
    """The engine has broken a law."""

    def __init__(self, law: str, detail: str, steps: int) -> None:
        super().__init__(f"{law} ({LAWS[law]}): {detail} [step {steps}]")
        self.law = law
        self.steps = steps


@dataclass(slots=True, eq=False)
class RequestBook:
    """A request: its client and purpose, and whether it is the client's only one."""

    number: int
    client: str
    purpose: Purpose
    began: float
    is_bulk: bool
    is_only: bool = True
    ended: bool = False
    jobs: list["JobBook"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class JobBook:
    """A job: how many sequences were taken, the forward of each sequence, and when it ended."""

    job: Job
    owner: RequestBook | None
    takes_at_entry: int
    forwards: list[Forward | None]
    taken: int = 0
    resolved_at: float | None = None


class _Outcome(asyncio.Event):
    """The event of a resolved job, which calls the auditor."""

    def __init__(self, resolved: Callable[[], None]) -> None:
        super().__init__()
        self._resolved = resolved

    def set(self) -> None:
        super().set()
        self._resolved()


@dataclass(slots=True)
class _Memory:
    """The token budget of a model on a device, since a forward there ran out of memory."""

    limit: int
    failed: Forward  # Its end moves while others preempt it.
    fitted: int = 0


class Auditor:
    """Checks the laws of one engine, whose forwards have at most `most_tokens`."""

    def __init__(self, loop: VirtualLoop, settings: EngineSettings) -> None:
        self._loop = loop
        self._settings = settings
        self.most_tokens = MOST_TOKENS
        self._engine: EngineCore | None = None
        self._broken: LawBrokenError | None = None
        self._jobs: dict[Job, JobBook] = {}
        self._unresolved: set[Job] = set()
        self._sequences: dict[int, tuple[JobBook, int]] = {}
        self._takes = 0
        self._quiets = 0
        self._excess: dict[tuple[Hashable, Hashable], float] = {}
        self._owed: dict[Hashable, float] = {}
        self._failing: dict[FakeDevice, list[Forward]] = {}
        self._memory: dict[tuple[FakeDevice, Model], _Memory] = {}
        self._leased: Counter[int] = Counter()
        self._preempting: dict[DeviceExecutor, list[Batch]] = {}
        self._free: dict[ConcurrencyLimit, int] = {}

    # Watching the engine.

    def attach(self, engine: EngineCore) -> None:
        self._engine = engine
        self._queue = queue = engine._queue
        self._devices = devices = engine._devices
        put, take, remove = queue.put, queue.take, devices.remove

        def watched_put(job: Job) -> None:
            self._enters(job)
            put(job)

        def watched_take(
            limits_of: LimitsOf,
            serves: Callable[[Model], bool] = lambda _: True,
            among: Iterable[Job] | None = None,
        ) -> Batch | None:
            return self._watch_take(take, limits_of, serves, among)

        def watched_remove(model: Model) -> None:
            self._unloads(model)
            remove(model)

        queue.put = watched_put  # type: ignore[method-assign]
        queue.take = watched_take  # type: ignore[method-assign]
        devices.remove = watched_remove  # type: ignore[method-assign]
        for limit in (engine.embedding._waiting, engine.scoring._limit):
            self._free[limit] = 0
            limit._retry_after = self._watched_refusal(limit)
        self._loop.on_quiet = self._quiet
        self._loop.set_exception_handler(self._unhandled)

    def fail(self, law: str, detail: str) -> None:
        if self._broken is None:
            self._broken = LawBrokenError(law, detail, self._loop.steps)
        raise self._broken

    def check(self) -> None:
        """Raise the broken law, which the engine may have caught."""
        if self._broken is not None:
            raise self._broken

    def _watched_refusal(self, limit: ConcurrencyLimit) -> Callable[[], int]:
        estimate_retry_after = limit._retry_after

        def refused() -> int:
            owner = OWNER.get()
            # A permit may have become free after the time to wait for it was over.
            free = min(limit._free, self._free[limit])
            if owner and owner.is_only and not limit.held_by(owner.client) and free:
                self.fail("place", f"{owner.client} is refused, and {free} places are free")
            return estimate_retry_after()

        return refused

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._broken is None:
            error = context.get("exception")
            self._broken = LawBrokenError(
                "silence", f"{context['message']}: {error!r}", self._loop.steps
            )

    # Jobs.

    def _enters(self, job: Job) -> None:
        owner = OWNER.get()
        book = JobBook(job, owner, self._takes, [None] * len(job.sequences))
        self._jobs[job] = book
        self._unresolved.add(job)
        if owner is not None:
            owner.jobs.append(book)
            if job.is_bulk != owner.is_bulk:
                self.fail("class share", f"bulk is {job.is_bulk}, not {owner.is_bulk}")
        for index, sequence in enumerate(job.sequences):
            self._sequences[id(_ids(sequence))] = book, index
        waiting = set[Hashable]()
        for other in self._queue._jobs:
            waiting.update(_keys(other))
        begins = set(_keys(job)) - waiting
        self._excess = {
            pair: tokens for pair, tokens in self._excess.items() if not begins & {*pair}
        }
        job._resolved = _Outcome(lambda: self._resolved(book))

    def _resolved(self, book: JobBook) -> None:
        now, job = self._loop.now, book.job
        if book.resolved_at is not None:
            self.fail("once", "a job is resolved a second time")
        book.resolved_at = now
        self._unresolved.discard(job)
        error = job._error
        if job.state is JobState.COMPLETED:
            for forward in book.forwards:
                if forward is None or forward.ends > now + _MOMENT:
                    self.fail("own", "a job is completed before its last forward has returned")
        self._check_limit(book, overdue=isinstance(error, InferenceTimeoutError))

    def _check_limit(self, book: JobBook, *, overdue: bool) -> None:
        """Check that a job fails at the time limit of a forward, if and only if that is exceeded.

        The limit counts from when the device begins the forward. It includes neither the wait for
        the thread or for a part of a preempted forward, nor earlier forwards on the device.
        """
        now, job = self._loop.now, book.job
        limits = {
            forward: self._limit_of(forward, job)
            for forward in book.forwards
            if forward is not None
        }
        if not overdue:
            for forward, limit in limits.items():
                seconds = min(forward.ends, now) - forward.began
                if seconds > limit + _MOMENT:
                    self.fail("deadline", f"a forward of {seconds:.3f} s is let pass, not {limit}")
            return
        late = [now - forward.began - limit for forward, limit in limits.items()]
        if job.time_limit is not None:  # The limit of all forwards, without halves that failed.
            spent = sum(max(0.0, min(forward.ends, now) - forward.began) for forward in limits)
            if spent < job.time_limit - job.time_spent - _MOMENT:
                self.fail("deadline", f"a job is cut off after {spent:.3f} s, of {job.time_limit}")
        elif not any(abs(seconds) <= _MOMENT for seconds in late):
            self.fail("deadline", f"a job is cut off, with {late} s above the limits")

    def _limit_of(self, forward: Forward, job: Job) -> float:
        """Return the limit that is set, or else five times the predicted seconds."""
        if job.time_limit is not None:
            return job.time_limit - job.time_spent
        if self._settings.gpu_process_timeout is not None:
            return self._settings.gpu_process_timeout
        tokens = sum(len(ids) * (1 + len(ids) / _DOUBLED_LENGTH) for ids in forward.sequences)
        device = forward.device
        least = GPU_SECONDS if device.on_gpu else CPU_SECONDS
        return max(least, 5.0 * tokens / device.tokens_per_second)

    # Batches.

    def _watch_take(
        self,
        take: Callable[..., Batch | None],
        limits_of: LimitsOf,
        serves: Callable[[Model], bool],
        among: Iterable[Job] | None,
    ) -> Batch | None:
        queue = self._queue
        root, before = queue._root, _clocks(queue)
        served = [job for job in queue._jobs if serves(job.model)]
        chosen = None if among is None else list(among)
        handed_over = len(queue._handed_over)
        batch = take(limits_of, serves, chosen)
        if batch is None:
            return None
        self._takes += 1
        executor: DeviceExecutor = serves.__self__  # type: ignore[attr-defined]
        if chosen is None:
            self._preempting[executor] = []
        else:
            self._check_preemption(batch, executor)
        if queue._root is root and any(
            now < then for now, then in zip(_clocks(queue), before, strict=True)
        ):
            self.fail("time", f"clocks fall from {before} to {_clocks(queue)}")
        # Batches that were not launched when their device failed are handed over too.
        if len(queue._handed_over) < handed_over and all(
            part.stop <= self._jobs[part.job].taken for part in batch.slices
        ):
            self._check_unresolved(batch)
            return batch
        self._check_order(batch)
        self._check_budget(batch, limits_of, preempts=chosen is not None)
        self._check_shares(batch, served, preempts=chosen is not None)
        return batch

    def _check_preemption(self, batch: Batch, executor: DeviceExecutor) -> None:
        """Check the class of a preempting batch, and the time of all before it."""
        preempting = self._preempting[executor]
        outer = next(batch for batch in executor._in_flight if batch.preempts is None)
        is_bulk = all(part.job.is_bulk for part in outer.batch.slices)
        if not is_bulk and any(part.job.is_bulk for part in batch.slices):
            self.fail("preemption", "a bulk job preempts an interactive one")
        forwards = {
            forward
            for before in preempting
            for part in before.slices
            for forward in self._jobs[part.job].forwards[part.start : part.stop]
            if forward is not None
        }
        spent = sum(forward.ends - forward.began for forward in forwards)
        if spent > outer.expected_seconds + _MOMENT:
            self.fail("preemption", f"{spent:.3f} s are not enough beside {outer.expected_seconds}")
        preempting.append(batch)

    def _check_unresolved(self, batch: Batch) -> None:
        for part in batch.slices:
            if self._jobs[part.job].resolved_at is not None:
                self.fail("leavers", "a batch that is handed over has a resolved job")

    def _check_order(self, batch: Batch) -> None:
        for part in batch.slices:
            book = self._jobs[part.job]
            if part.start != book.taken or not part.start < part.stop <= len(book.forwards):
                self.fail("order", f"{part.start} to {part.stop} are taken after {book.taken}")
            if book.resolved_at is not None:
                self.fail("leavers", "sequences of a resolved job are taken")
            if book.owner is not None and book.owner.ended:
                self.fail("leavers", "sequences are taken of a request that is over")
            if part.job.model is not batch.model:
                self.fail("own", "a batch holds the jobs of two models")
            book.taken = part.stop

    def _check_budget(self, batch: Batch, limits_of: LimitsOf, *, preempts: bool) -> None:
        limits, tokens, sequences = limits_of(batch.model), batch.tokens, len(batch.sequences)
        if sequences > 1 and tokens > limits.max_tokens:
            self.fail("budget", f"{tokens} tokens in one forward, budget {limits.max_tokens}")
        if sequences > (limits.max_sequences or sequences):
            self.fail("budget", f"{sequences} sequences in one forward")
        if len(batch.slices) > (limits.max_requests or len(batch.slices)):
            self.fail("budget", f"{len(batch.slices)} requests in one forward")
        if preempts and tokens > _MAX_PREEMPTING_TOKENS:
            self.fail("preemption", f"{tokens} tokens preempt a forward")

    def _check_shares(self, batch: Batch, served: list[Job], *, preempts: bool) -> None:
        """Check that two nodes of a group share a device fairly while both wait for it.

        At the beginning, one is ahead of the other by at most a forward, since leads are limited,
        and at the end by at most its last forward. So the tokens that it was served, divided by its
        weight, exceed those of the other by at most the sum. Preempting batches, and batches of
        devices for which the other does not wait, count only for their own node.
        """
        still = {key for job in self._queue._jobs for key in _keys(job)}
        gains: Counter[Hashable] = Counter()
        for part in batch.slices:
            gains.update(dict.fromkeys(_keys(part.job), part.tokens))
        groups: dict[Hashable, set[Hashable]] = {}
        for job in served:
            for key in _keys(job):
                groups.setdefault(_group(key), set()).add(key)
        self._count_owed(gains, groups, still, preempts=preempts)
        for key, tokens in gains.items():
            gain, group = tokens / _weight(key), groups[_group(key)]
            for pair in [pair for pair in self._excess if pair[0] == key]:
                self._excess[pair] = max(0.0, self._excess[pair] - gain)
            if isinstance(key, Job) and len(group) > _MAX_WATCHED_JOBS:
                # Start again later, because the tokens are not counted now.
                for pair in [pair for pair in self._excess if key in pair]:
                    del self._excess[pair]
            elif not preempts:  # Others that do not wait any more lose nothing.
                self._count_excess(key, gain, (group & still) - {key})

    def _count_owed(
        self,
        gains: Counter[Hashable],
        groups: dict[Hashable, set[Hashable]],
        still: set[Hashable],
        *,
        preempts: bool,
    ) -> None:
        """Count the tokens of its share of the group that each waiting node did not get."""
        for group in groups.values():
            tokens = 0 if preempts else sum(gains[key] for key in group)
            fair = tokens / sum(map(_weight, group))
            for key in group:
                owed = self._owed.get(key, 0.0) + fair - gains[key] / _weight(key)
                self._owed[key] = max(0.0, owed)
                if owed > _MAX_OWED_FORWARDS * self.most_tokens:
                    self.fail("turnover", f"{key} is owed {owed:.0f} weighted tokens")
        for key in [key for key in self._owed if key not in still]:
            del self._owed[key]

    def _count_excess(self, key: Hashable, gain: float, others: set[Hashable]) -> None:
        """Count the tokens that a node got while others of its group wait."""
        bound = self.most_tokens * (1 + 1 / _weight(key))
        for other in others:
            excess = self._excess[other, key] = self._excess.get((other, key), 0.0) + gain
            if excess > bound + _ROUNDING:
                law = "share" if isinstance(key, tuple) else "class share"
                law = "job share" if isinstance(key, Job) else law
                self.fail(law, f"{excess:.0f} weighted tokens of {key} above {bound:.0f}")

    # Forwards.

    def launched(self, forward: Forward) -> None:
        now, device = self._loop.now, forward.device
        failing = self._failing.setdefault(device, [])
        # A forward that preempts, or is preempted, may fail before the other.
        if any(failed.ends < now - _MOMENT for failed in failing):
            self.fail("failed device", f"{device.name} has failed and gets a forward")
        retried = False
        for ids in forward.sequences:
            book, index = self._sequences[id(ids)]
            if index >= book.taken:
                self.fail("order", "a sequence is computed that was not taken")
            if book.resolved_at is not None:
                self.fail("leavers", "a forward begins for a request that has its outcome")
            last = book.forwards[index]
            if last is not None:
                retried = True
                self._check_retry(last, forward)
            book.forwards[index] = forward
        self._note_memory(forward)
        if forward.fault in {"lasting", "crash"}:
            failing.append(forward)
        if not retried and len(forward.sequences) > 1:
            self._check_memory(forward)

    def _check_retry(self, last: Forward, forward: Forward) -> None:
        """A sequence is computed again only after a lack of memory or on another device."""
        if last.fault == "memory":
            if forward.tokens >= last.tokens:
                self.fail("halves", f"{forward.tokens} tokens after {last.tokens} did not fit")
        elif last.fault == "lasting":
            if last.device is forward.device:
                self.fail("failed device", "a batch is given to the device that it has failed")
        elif last.fault == "crash":
            self.fail("failed device", "what crashed a device is given to another one")
        else:
            self.fail("order", f"a sequence is computed twice, after {last.fault}")

    def _note_memory(self, forward: Forward) -> None:
        key = forward.device, self._of_jobs(forward)
        known = self._memory.get(key)
        if forward.fault == "memory" and len(forward.sequences) > 1:
            limit = max(1, forward.tokens // 2)
            if known is not None:
                limit = min(limit, known.limit + known.fitted)
            self._memory[key] = _Memory(limit, forward)
        elif known is not None and forward.fault in _RETURNS:
            known.fitted += max(1, self.most_tokens // 100)
        elif (
            known is not None
            and forward.fault == "thread_dies"
            and forward.began <= known.failed.ends
        ):  # The error of the preempted forward is lost with the thread.
            del self._memory[key]

    def _check_memory(self, forward: Forward) -> None:
        known = self._memory.get((forward.device, self._of_jobs(forward)))
        if (
            known is not None
            and forward.fault != "memory"
            and not forward.device.on_gpu
            and known.failed.ends < forward.began
            and forward.tokens > known.limit + known.fitted
        ):
            self.fail(
                "halves", f"{forward.tokens} tokens, though {known.limit} are left of the budget"
            )

    def _of_jobs(self, forward: Forward) -> Model:
        return self._sequences[id(forward.sequences[0])][0].job.model

    # Leases.

    def leases(self, model: Model) -> None:
        self._leased[id(model)] += 1

    def releases(self, model: Model) -> None:
        self._leased[id(model)] -= 1

    def _unloads(self, model: Model) -> None:
        if self._leased[id(model)]:
            self.fail("lease", "a model is unloaded that a request has")
        if any(job.model is model for job in self._unresolved):
            self.fail("lease", "a model is unloaded that a job needs")

    # Moments at which time passes.

    def _quiet(self) -> None:
        if self._broken is not None:
            raise self._broken
        queue = self._queue
        waits = queue._jobs or queue._handed_over
        rests = True
        self._free = {limit: limit._free for limit in self._free}
        self._quiets += 1
        if self._quiets % 16 == 0:
            self._check_lost()
        for executor in self._devices._executors:
            if executor._in_flight:
                rests = False
            if waits and self._may_take(executor) and queue.has_work(executor.serves):
                self.fail("work", f"{executor.name} rests while a job waits for it")
        if waits:
            self._check_stuck()
        if rests and not waits and self._unresolved:
            self.fail("lost", f"{len(self._unresolved)} jobs are nowhere")

    def _check_lost(self) -> None:
        """Check that every job whose sequences are all taken is on a device or handed over."""
        on_device = {
            part.job
            for executor in self._devices._executors
            for in_flight in executor._in_flight
            for part in in_flight.batch.slices
        }
        handed_over = {part.job for batch in self._queue._handed_over for part in batch.slices}
        for job in self._unresolved:
            if job.state is JobState.TAKEN and job not in on_device and job not in handed_over:
                self.fail("lost", "a job was taken, and is on no device")

    def _check_stuck(self) -> None:
        """Check that no job waits only for devices that have failed or are stuck."""
        executors, stuck = self._devices._executors, list[DeviceExecutor]()
        for executor in executors:
            watchdog = executor.watchdog
            limit = max(watchdog._limits, default=float("inf"))
            if self._loop.now - watchdog._since > 2 * limit + 0.1:
                stuck.append(executor)
        for job in self._queue._jobs if stuck or self._devices.failed else ():
            serving = [executor for executor in executors if executor.serves(job.model)]
            if all(executor in stuck for executor in serving):
                self.fail("lost", "a job waits for devices that do not come back")

    def check_zero(self) -> None:
        """Check that nothing is held after a while without requests."""
        engine, queue = self._engine, self._queue
        assert engine is not None
        held = {
            "jobs in the queue": len(queue._jobs),
            "batches handed over": len(queue._handed_over),
            "waiting tokens": queue.waiting_tokens,
            "clients": len(queue._clients),
            "requests": engine._requests._count,
            "unresolved jobs": len(self._unresolved),
            "places": engine.waiting,
            "places of rerankers": engine.scoring._limit.held,
            "tokenizer threads": engine._tokenizer_threads._usual._permits.held,
        }
        for executor in self._devices._executors:
            held[f"batches on {executor.name}"] = len(executor._in_flight)
            held[f"limits on {executor.name}"] = len(executor.watchdog._limits)
            slots = executor.max_batches - executor._slots._value
            held[f"slots of {executor.name}"] = 0 if executor.failed else slots
        for status in engine._models._models.values():
            held[f"requests of {status.name}"] = status.requests
            held[f"uses of {status.name}"] = status.uses
        consumers = self._devices._executors.values()
        expected = {asyncio.current_task(), engine._models._watch, *consumers}
        tasks = [task for task in asyncio.all_tasks() if task not in expected]
        held["tasks"] = len(tasks)
        left = {name: count for name, count in held.items() if count}
        if left:
            self.fail("zero", f"{left} {tasks[:3]}")

    def _may_take(self, executor: DeviceExecutor) -> bool:
        if executor.failed or self._settings.batch_wait_ms:
            return False
        if not executor._in_flight:
            return True
        return len(executor._in_flight) < executor.max_batches and all(
            in_flight.launched.is_set() and not in_flight.batch.handed_over
            for in_flight in executor._in_flight
        )


def _keys(job: Job) -> tuple[Hashable, ...]:
    """The keys of the nodes from a class to a job: class, client in that class, and job."""
    return job.is_bulk, (job.is_bulk, job.client), job


def _group(key: Hashable) -> Hashable:
    """The group that a node is in."""
    match key:
        case bool():
            return "classes"
        case (bool() as is_bulk, str()):
            return "clients", is_bulk
        case Job():
            return "jobs", key.is_bulk, key.client
    raise TypeError(key)


def _weight(key: Hashable) -> int:
    return (BULK_WEIGHT if key else INTERACTIVE_WEIGHT) if isinstance(key, bool) else 1


def _clocks(queue: JobQueue) -> tuple[float, ...]:
    return queue._root.clock, *(node.clock for node in queue._classes.values())


def _ids(sequence: TokenSequence) -> Any:
    return join(sequence) if isinstance(sequence, JoinedIds) else sequence
