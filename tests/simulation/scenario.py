"""A scenario made from a seed: settings, devices, models, clients, faults, and its end."""

import asyncio
import contextlib
import gc
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

import structlog

from smart_embedder.core import EngineCore
from smart_embedder.errors import SmartEmbedderError
from smart_embedder.interface import DefaultModels
from smart_embedder.requests import Outputs
from smart_embedder.settings import EngineSettings, ModelEntry
from tests.simulation.auditor import Auditor, LawBrokenError
from tests.simulation.clients import Client, World
from tests.simulation.fakes import (
    GIGABYTE,
    MOST_TOKENS,
    Chances,
    FakeDevice,
    FakeLoader,
    FakeMemory,
    default_models,
    text_of,
)
from tests.simulation.virtual_time import (
    Effect,
    Moments,
    StandstillError,
    VirtualLoop,
    VirtualThread,
    virtual_time,
)

_TEXTS = 300
_FIRST_TEXT = 10
_KINDS = (
    Outputs(dense=True),
    Outputs(dense=True),
    Outputs(sparse=True),
    Outputs(dense=True, sparse=True, colbert=True),
)
_SHARE_OF_CONTESTS = 0.15
_SHARE_OF_CROWDED_CONTESTS = 0.5
_SHARE_OF_PINNED_MODELS = 0.1
_SHARE_OF_SMALL_GPUS = 0.05
_SHARE_OF_COMMON_MOMENTS = 0.3


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a run: steps, virtual seconds, and the outcomes of requests.

    `broken` is the broken law, if there is one.
    """

    seed: int
    steps: int
    seconds: float
    tally: dict[str, int]
    broken: LawBrokenError | None = None


class Scenario:
    """A run of the engine that depends only on its seed."""

    def __init__(self, seed: int, most_steps: int = 30_000) -> None:
        self.seed = seed
        self.most_steps = most_steps
        self.random = Random(seed)
        # Clients with long requests compete for small forwards, and there are no faults.
        self.is_contest = Random(f"contest {seed}").random() < _SHARE_OF_CONTESTS
        # Some clients of a contest send many short requests beside long ones.
        self.is_crowded = Random(f"crowd {seed}").random() < _SHARE_OF_CROWDED_CONTESTS
        # Two further models have a device each, and there are no faults.
        self.has_pinned_models = (
            not self.is_contest and Random(f"pinned {seed}").random() < _SHARE_OF_PINNED_MODELS
        )
        # Whether forwards on GPUs often run out of memory, and the next ones are often overdue.
        self.has_small_gpus = (
            not self.is_contest
            and not self.has_pinned_models
            and Random(f"small {seed}").random() < _SHARE_OF_SMALL_GPUS
        )
        # Many events are at the same moment.
        self.moments = Moments(Random(f"moments {seed}").random() < _SHARE_OF_COMMON_MOMENTS)
        self.loop = VirtualLoop(self._seconds_on_a_thread)
        self.effects: list[Effect] = []
        self.chances = self._chances()
        self.budget = self.random.choice([64, 256, 512, 1024, 4096])
        self.entries = self._entries()
        if self.is_contest:
            self.chances.calm()
            self.budget, self.entries = self.random.choice([64, 64, MOST_TOKENS]), []
        if self.has_pinned_models:
            self.chances.calm()
            self.budget = self.random.choice([64, 256])
            self.entries = [ModelEntry(name=f"model-{number}", load="start") for number in range(2)]
        if self.has_small_gpus:
            self.chances = Chances(overdue=0.02)
            self.budget = self.random.choice([256, 1024])
        self.request_timeout = self.random.choice([20.0, 60.0, 90.0])
        self.shutdown_timeout = self.random.choice([2.0, 10.0, 30.0])
        self.settings = self._settings()
        self.auditor = Auditor(self.loop, self.settings)
        self.devices = self._devices()
        self.loader = self._loader()
        self.engine = EngineCore(
            self.settings,
            self._load_defaults,
            make_thread=lambda name, _: VirtualThread(self.loop, self.effects, name),
            request_timeout=self.request_timeout,
            shutdown_timeout=self.shutdown_timeout,
        )
        self.auditor.attach(self.engine)
        self.world = World(
            self.loop,
            self.random,
            self.engine,
            self.auditor,
            self._texts(),
            self.moments,
            self.request_timeout,
            self.shutdown_timeout,
        )
        longest = min(MOST_TOKENS, 2 * max(map(len, self.world.texts)))
        self.auditor.most_tokens = max(self.budget, longest)
        self.ends_by_signal = self.random.random() < 0.3
        self.seconds = self.random.choice([30.0, 120.0, 300.0])
        self._stopping = False

    def run(self) -> Report:
        """Run the scenario to its end."""
        broken: LawBrokenError | None = None
        with virtual_time(self.loop):
            try:
                self.loop.run_until_complete(self._main())
                self.auditor.check()
            except LawBrokenError as error:
                broken = error
            except StandstillError as error:
                broken = LawBrokenError("lost", str(error), self.loop.steps)
            except Exception as error:  # noqa: BLE001 - any other error breaks a law
                broken = LawBrokenError("silence", repr(error), self.loop.steps)
        tally, steps, seconds = self.world.tally, self.loop.steps, self.loop.now
        self._discard()
        return Report(self.seed, steps, seconds, tally, broken)

    def _discard(self) -> None:
        """Cancel the tasks that are left after a broken law."""
        self.loop.set_exception_handler(lambda *_: None)
        self.loop.on_quiet = lambda: None
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            with contextlib.suppress(StandstillError):
                self.loop.run_until_complete(asyncio.wait(left, timeout=1000.0))
        self.loop.close()

    # Settings, devices and models.

    def _seconds_on_a_thread(self) -> float:
        draw = self.random.random()
        return self.moments.rounded(0.0005 + 0.002 * draw if draw < 0.97 else draw)

    def _chances(self) -> Chances:
        kind = self.random.choice(["calm", "faulty", "hard", "overdue", "deadly", "deadly"])
        if kind == "calm":
            return Chances()
        chances = Chances(raises=0.01, not_finite=0.01, long=0.02, passing=0.005, load_fails=0.2)
        if kind == "hard":
            chances.thread_dies, chances.overdue = 0.02, 0.01
        if kind == "overdue":
            chances.overdue, chances.never = 0.03, 0.0005
        if kind == "deadly":
            chances.lasting, chances.crash = 0.01, 0.005
        return chances

    def _entries(self) -> list[ModelEntry]:
        draw, entries = self.random, []
        for number in range(draw.choice([0, 0, 2, 4])):
            task = "embed" if draw.random() < 0.7 else "rerank"
            load = "start" if draw.random() < 0.2 else "first_use"
            entries.append(ModelEntry(name=f"model-{number}", task=task, load=load))
        return entries

    def _settings(self) -> EngineSettings:
        draw = self.random
        return EngineSettings(
            max_queue_size=draw.choice([2, 5, 20, 200]),
            rerank_max_queue=draw.choice([2, 8, 32]),
            rerank_gpu_timeout=self.request_timeout * 0.6,
            gpu_process_timeout=draw.choice([None, 3.0, 10.0, 10.0]),
            batch_wait_ms=draw.choice([0, 0, 0, 5]),
            max_batch_sequences=draw.choice([None, None, 8, 64]),
            max_requests_in_batch=draw.choice([None, None, None, 3]),
            tokenizer_threads=draw.choice([1, 2, 4]),
            embedding_cache_bytes=draw.choice([0, 2**14, 2**20]),
            reranker_model=draw.choice(["reranker", "reranker", "late-interaction", "none"]),
            embedding_model="embedder",
            models=tuple(self.entries) or None,
            model_memory_threshold=0.9,
        )

    def _devices(self) -> list[FakeDevice]:
        draw = self.random
        on_gpu = draw.random() < 0.4 or self.has_small_gpus
        speed = draw.choice([200.0, 1000.0, 5000.0, 20000.0])
        patience = self.settings.gpu_process_timeout or (15.0 if on_gpu else 30.0)
        capacity = draw.choice([10**9, 10**9, self.budget // 2, 2 * self.budget, 30])
        if self.has_small_gpus:
            capacity = self.budget // 2
        return [
            FakeDevice(
                f"cuda:{number}" if on_gpu else f"cpu:{number}",
                on_gpu,
                speed,
                draw.choice([0.001, 0.01]),
                max(capacity, 8),
                draw,
                self.chances,
                self.loop.time,
                self.effects,
                self.auditor.launched,
                patience,
                self.moments,
            )
            for number in range(self._count_devices())
        ]

    def _count_devices(self) -> int:
        if self.has_pinned_models:
            return 2
        return 1 if self.is_contest else self.random.choice([1, 2, 2, 3])

    def _loader(self) -> FakeLoader:
        sizes = {entry.name: self.random.randint(1, 5) * GIGABYTE for entry in self.entries}
        budgets = {entry.name: self.random.choice([64, self.budget]) for entry in self.entries}
        gigabytes = self.random.choice([4, 6, 10, 100]) if self.entries else 100
        placements = {}
        if self.has_pinned_models:
            gigabytes = 100
            names = [entry.name for entry in self.entries]
            placements = {name: [device] for name, device in zip(names, self.devices, strict=True)}
        memory = FakeMemory(gigabytes * GIGABYTE)
        return FakeLoader(memory, self.devices, sizes, budgets, placements)

    def _load_defaults(self, settings: EngineSettings) -> DefaultModels:
        return default_models(settings, self.devices, self.budget, self.loader)

    def _texts(self) -> list[str]:
        draw = self.random
        longest = 30 if self.is_contest else draw.choice([60, 300, 3000, 6000])
        if self.has_small_gpus:
            longest = 60
        lengths = [
            min(longest, int(draw.paretovariate(0.8) * 5)) + draw.randint(3, 6)
            for _ in range(_TEXTS)
        ]
        return [text_of(number, length) for number, length in enumerate(lengths, _FIRST_TEXT)]

    # The run.

    async def _main(self) -> None:
        await self.engine.start()
        clients = self._clients()
        tasks = [asyncio.ensure_future(client) for client in clients]
        if self.ends_by_signal:
            await asyncio.sleep(self.seconds * self.random.random())
            await self._drain()
        else:
            await asyncio.sleep(self.seconds)
        self._stopping = True
        self.chances.calm()
        for device in self.devices:
            device.patience = 0.0
        await asyncio.gather(*tasks)
        if not self.ends_by_signal:
            await self._settle()
            await self._probe()
            await self._settle()
            await self._drain()
        self._check_end()

    def _clients(self) -> list[Coroutine[Any, Any, None]]:
        draw, running = self.random, []
        kinds: list[Callable[[Client], Coroutine[Any, Any, None]]] = [
            self._bulk,
            self._bulk,
            self._lonely,
            self._lonely,
            self._leaving,
            self._many,
            self._short,
            self._reranks,
            self._commands,
        ]
        for number in range(draw.randint(2, 8)):
            bulk_share = draw.choice([0.0, 0.0, 0.0, 0.3, 1.0])
            client = Client(self.world, f"client-{number}", bulk_share)
            is_bulk = self.is_contest or self.has_small_gpus
            kind = self._bulk if is_bulk else draw.choice(kinds)
            if self.has_pinned_models:
                kind, client = self._pinned, Client(self.world, f"client-{number}", bulk_share=0.0)
            elif self.is_contest and self.is_crowded:
                kind = draw.choice([self._bulk, self._crowd])
            running.append(kind(client))
        return running

    def _some_texts(self, most: int) -> list[str]:
        return self.random.choices(self.world.texts, k=self.random.randint(1, most))

    def _some_model(self, task: str, share: float = 0.5) -> str | None:
        names = [entry.public_name for entry in self.entries if entry.task == task]
        return self.random.choice(names) if names and self.random.random() < share else None

    @property
    def _is_over(self) -> bool:
        """True when clients send no more requests, because their time or steps are used up."""
        return self._stopping or self.loop.steps > self.most_steps

    async def _think(self, most: float) -> None:
        await asyncio.sleep(self.moments.rounded(self.random.random() * most))

    async def _connections(
        self,
        least: int,
        most: int,
        ask: Callable[[], Coroutine[Any, Any, str]],
        pause: float,
        after_errors: float = 0.0,
    ) -> None:
        """Open connections that ask, wait for up to `pause` seconds, and ask again."""

        async def connection() -> None:
            while not self._is_over:
                failed = await ask() != "success"
                await self._think((failed and after_errors) or pause)

        await asyncio.gather(*(connection() for _ in range(self.random.randint(least, most))))

    async def _bulk(self, client: Client) -> None:
        """Several connections that always send long requests."""

        def ask() -> Coroutine[Any, Any, str]:
            return client.embed(
                self._some_texts(64),
                model=self._some_model("embed", 0.3),
                kinds=self.random.choice(_KINDS),
            )

        await self._connections(1, 12, ask, 0.01, after_errors=4.0)

    async def _crowd(self, client: Client) -> None:
        """One connection with long requests, and many with short ones."""
        shortest = sorted(self.world.texts, key=len)[: _TEXTS // 4]

        def ask_long() -> Coroutine[Any, Any, str]:
            return client.embed(self.random.choices(self.world.texts, k=64))

        def ask_short() -> Coroutine[Any, Any, str]:
            return client.embed([self.random.choice(shortest)])

        await asyncio.gather(
            self._connections(1, 1, ask_long, 0.01, after_errors=4.0),
            self._connections(4, 16, ask_short, 0.001, after_errors=4.0),
        )

    async def _pinned(self, client: Client) -> None:
        """Long requests for one model, or for both models in turn, but never for both at once."""
        names = [entry.public_name for entry in self.entries]
        period = self.random.choice([2.0, 10.0, 40.0])
        for name in itertools.cycle(self.random.choice([names[1:], names])):
            if self._is_over:
                return
            ends = self.loop.now + period

            async def connection(name: str = name, ends: float = ends) -> None:
                while not self._is_over and self.loop.now < ends:
                    failed = await client.embed(self._some_texts(32), model=name) != "success"
                    await self._think(4.0 if failed else 0.01)

            await asyncio.gather(*(connection() for _ in range(self.random.randint(1, 6))))

    async def _lonely(self, client: Client) -> None:
        """Single short requests with pauses."""
        while not self._is_over:
            await client.embed(
                self._some_texts(2),
                truncate=self.random.random() < 0.8,
                model=self._some_model("embed", 0.2),
            )
            await self._think(5.0)

    async def _leaving(self, client: Client) -> None:
        """Requests that are cancelled at any moment."""

        def ask() -> Coroutine[Any, Any, str]:
            return client.embed(
                self._some_texts(16),
                leaves_after=self.random.choice([0.0, 0.002, 0.1, 2.0]) * self.random.random(),
                model=self._some_model("embed", 0.3),
            )

        await self._connections(1, 6, ask, 0.5)

    async def _many(self, client: Client) -> None:
        """Bursts of requests, often with the same texts."""
        while not self._is_over:
            await self._think(30.0)
            texts = self._some_texts(3)
            same = self.random.random() < 0.5
            await asyncio.gather(
                *(
                    client.embed(texts if same else self._some_texts(3))
                    for _ in range(self.random.randint(10, 60))
                )
            )

    async def _short(self, client: Client) -> None:
        """Short texts on several connections."""
        shortest = sorted(self.world.texts, key=len)[: _TEXTS // 4]

        def ask() -> Coroutine[Any, Any, str]:
            return client.embed([self.random.choice(shortest)])

        await self._connections(2, 16, ask, 0.01, after_errors=4.0)

    async def _reranks(self, client: Client) -> None:
        """Rerank requests, some of which are cancelled."""
        leaves = self.random.random() < 0.3

        def ask() -> Coroutine[Any, Any, str]:
            query, *passages = self._some_texts(30) + self._some_texts(1)
            model = self._some_model("rerank")
            leaves_after = self.random.random() if leaves else None
            return client.rerank(query, passages, model=model, leaves_after=leaves_after)

        await self._connections(1, 6, ask, 1.0)

    async def _commands(self, client: Client) -> None:
        """An operator who loads and unloads models, while other programs use memory."""
        while not self._is_over:
            await self._think(20.0)
            if not self.entries:
                continue
            name = self.random.choice(self.entries).public_name
            order = self.engine.load if self.random.random() < 0.5 else self.engine.unload
            with contextlib.suppress(SmartEmbedderError):
                await order(name)
            memory = self.loader.memory
            memory.others = self.random.choice([0, 0, memory.total // 2])

    # The end.

    async def _settle(self) -> None:
        """Send no requests for a while, and check that nothing is held."""
        self.loader.memory.others = 0
        await asyncio.sleep(200.0)
        if any(executor.watchdog.stuck_seconds for executor in self.engine._devices._executors):
            return
        self.auditor.check_zero()

    async def _probe(self) -> None:
        """Check that every model serves again."""
        if self.engine.failure is not None or self.engine.failed_devices:
            return
        probe = Client(self.world, "probe", bulk_share=0.0)
        text = [text_of(_FIRST_TEXT, 4)]
        asked: list[tuple[str, str | None]] = [("embed", None)]
        if self.settings.reranker_model != "none":
            asked.append(("rerank", None))
        asked += [(entry.task, entry.public_name) for entry in self.entries]
        for task, name in asked:
            if task == "embed":
                outcome = await probe.embed(text, model=name)
            else:
                outcome = await probe.rerank(text[0], text, model=name)
            may_be_away = name and outcome in {"model_too_large", "loading"}
            if outcome != "success" and not may_be_away:
                answers = f"answers {outcome} when all is calm"
                self.auditor.fail("again", f"{name or f'the default to {task}'} {answers}")

    async def _drain(self) -> None:
        """Close the engine as after SIGTERM, and check that it ends in time."""
        began, self.world.draining_since = self.loop.now, self.loop.now
        await self.engine.close()
        # The timeout applies to the requests, and then to a forward that does not return.
        most = 2 * self.shutdown_timeout + 0.1
        if self.loop.now - began > most:
            self.auditor.fail("drain", f"it took {self.loop.now - began:.1f} s, of {most:.1f}")

    def _check_end(self) -> None:
        """Check that no task is left when the engine is closed."""
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            self.auditor.fail("zero", f"tasks are left: {left[:3]}")


def run(seed: int, most_steps: int = 30_000) -> Report:
    """Run the scenario of a seed, with the same result in any process."""
    logs = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    was_enabled = gc.isenabled()
    gc.disable()  # Otherwise, the time of a collection depends on earlier runs.
    gc.collect()
    # A scenario collects often. Frozen objects, such as all modules, are skipped; they stay frozen
    # for the next run.
    gc.freeze()
    try:
        return Scenario(seed, most_steps).run()
    finally:
        structlog.configure(**logs)
        if was_enabled:
            gc.enable()
