"""How long a sentence takes while another model is loaded beside it.

    python -m benchmarks.loading FOLDER --seconds 60

One client sends a sentence again and again to a model; then the same files are loaded as a second
model, by the first request for it, and the client goes on.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import httpx2
import numpy as np

from tests.support.server import RunningServer, run_server

_PATIENCE = 600.0
_SENTENCE = {"sentences": ["What does hybrid search do with the words of a query?"]}
_OTHER = "other-model"


async def send_until(server: RunningServer, done: "asyncio.Task[object]") -> list[float]:
    """Seconds of each request of one client, until `done`."""
    seconds = []
    async with httpx2.AsyncClient(base_url=server.url, timeout=_PATIENCE) as client:
        while not done.done():
            began = time.perf_counter()
            response = await client.post("/embeddings/", json=_SENTENCE)
            seconds.append(time.perf_counter() - began)
            response.raise_for_status()
    return seconds


async def load_other(server: RunningServer) -> float:
    """Seconds of the request that loads the other model."""
    began = time.perf_counter()
    async with httpx2.AsyncClient(base_url=server.url, timeout=_PATIENCE) as client:
        response = await client.post("/embeddings/", json=_SENTENCE | {"model": _OTHER})
        response.raise_for_status()
    return time.perf_counter() - began


async def compare(server: RunningServer, seconds: float) -> None:
    """Print the times of both."""
    await asyncio.to_thread(server.wait_until_healthy)
    alone = await send_until(server, asyncio.create_task(asyncio.sleep(seconds)))
    loading = asyncio.create_task(load_other(server))
    beside = await send_until(server, loading)
    usual = float(np.median(alone))
    print(f"the other model was there after {loading.result():.1f} seconds")
    for name, found in (("alone", alone), ("while it is loaded", beside)):
        quantiles = np.quantile(found, (0.5, 0.99, 1))
        shown = " ".join(f"{1000 * each:8.1f}" for each in quantiles)
        print(f"{name:20}{len(found):6} requests; P50, P99, longest in ms: {shown}")
        print(f"{'':20}P99 is {quantiles[1] / usual:.1f} times the median alone")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of an embedding model")
    parser.add_argument(
        "--seconds",
        type=float,
        default=30,
        help="seconds that are measured before the loading (%(default)g)",
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / _OTHER).symlink_to(folder)
        (scratch / "models.yaml").write_text(f"- name: {scratch / _OTHER}\n", "utf-8")
        settings = {"EMBEDDING_MODEL": str(folder), "MODELS": "models.yaml"}
        with run_server(scratch, REQUEST_TIMEOUT=str(_PATIENCE), **settings) as server:
            asyncio.run(compare(server, options.seconds))


if __name__ == "__main__":
    main()
