"""What a bulk load costs a single sentence, and what the sentence costs the bulk load.

    python -m benchmarks.fairness FOLDER --seconds 60 --rounds 3

Four clients keep the device saturated. Windows without and with one-sentence requests beside them
take turns, because the speed of a shared machine drifts; the sentences come one after the other, as
fast as they are answered. A forward's time is that of as many tokens as the budget allows, at the
rate of the bulk load alone.
"""

import argparse
import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.engine import DEFAULT_URGENCY, Engine
from app.models.load import load_models
from app.observability.metrics import Metrics
from app.settings import Settings
from benchmarks.workload import MIXED, draw_texts

SENTENCE = "babebi bobuba cacece dadedi fafefi gagegi hahehi jajeji"
BULK_CLIENTS = 4
BULK_TEXTS = 64


@dataclass(slots=True)
class Window:
    """What was seen in all windows of one kind."""

    bulk_tokens: float = 0.0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def bulk_rate(self) -> float:
        """Tokens of the bulk load in a second."""
        return self.bulk_tokens / self.seconds


async def keep_busy(engine: Engine, seed: int) -> None:
    """One client of the bulk load."""
    texts = draw_texts(MIXED, BULK_TEXTS, seed)
    while True:
        await engine.embed(texts)


async def send_sentences(engine: Engine, window: Window, seconds: float, urgency: int) -> None:
    """One sentence after the other for some seconds."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        result = await engine.embed([SENTENCE], urgency=urgency)
        window.latencies.append(time.perf_counter() - began)
        window.bulk_tokens -= result.tokens


async def observe(metrics: Metrics, window: Window, work: Coroutine[Any, Any, None]) -> None:
    """Add the tokens and the seconds that pass while `work` is done."""
    tokens, began = metrics.total(metrics.tokens), time.perf_counter()
    await work
    window.bulk_tokens += metrics.total(metrics.tokens) - tokens
    window.seconds += time.perf_counter() - began


async def compare(arguments: argparse.Namespace) -> tuple[Window, Window, int]:
    """The windows with the bulk load alone, those with sentences beside it, and the budget."""
    settings = Settings(embedding_model=str(arguments.folder), reranker_model="none")
    metrics, alone, beside = Metrics(), Window(), Window()
    async with Engine(settings, load_models, metrics) as engine:
        bulk = [asyncio.create_task(keep_busy(engine, seed)) for seed in range(BULK_CLIENTS)]
        await observe(metrics, Window(), asyncio.sleep(arguments.seconds / 4))
        for _ in range(arguments.rounds):
            await observe(metrics, alone, asyncio.sleep(arguments.seconds))
            sentences = send_sentences(engine, beside, arguments.seconds, arguments.urgency)
            await observe(metrics, beside, sentences)
        for task in bulk:
            task.cancel()
        await asyncio.wait(bulk)
        assert engine.models is not None
        return alone, beside, engine.models.max_batch_tokens


def report(alone: Window, beside: Window, max_batch_tokens: int) -> None:
    """Print what a sentence waited, in seconds and in forwards, and what the bulk load lost."""
    forward = max_batch_tokens / alone.bulk_rate
    p50, p99 = np.percentile(beside.latencies, [50, 99])
    print(f"sentences answered       {len(beside.latencies)}")
    print(f"one forward of the bulk  {forward:.3f} s")
    print(f"a sentence's answer, P50 {p50:.3f} s, {p50 / forward:.2f} forwards")
    print(f"a sentence's answer, P99 {p99:.3f} s, {p99 / forward:.2f} forwards")
    print(f"bulk load alone          {alone.bulk_rate:.0f} tokens/s")
    print(f"bulk load beside         {beside.bulk_rate:.0f} tokens/s")
    print(f"lost by the bulk load    {100 * (1 - beside.bulk_rate / alone.bulk_rate):.1f} %")


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of benchmarks.checkpoints")
    parser.add_argument(
        "--seconds", type=float, default=60, help="seconds of each measurement (%(default)g)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each case (%(default)s)")
    parser.add_argument(
        "--urgency",
        type=int,
        default=DEFAULT_URGENCY,
        help="the urgency of the single sentences, 0 to 7 (%(default)s)",
    )
    report(*asyncio.run(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
