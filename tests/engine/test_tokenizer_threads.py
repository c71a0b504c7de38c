"""Which thread tokenises a request: what takes seconds has one of its own."""

import threading

import pytest

from app.engine.tokenizer_threads import TokenizerThreads

USUAL = {
    "a sentence": ["search vector"],
    "many texts": ["search vector"] * 1024,
    "a novel": ["search " * 100_000],
    "Chinese": ["检索向量" * 100_000],
    "a few ligatures": ["ﷺ" * 50_000],
}
ENORMOUS = {
    "megabytes": ["search " * 200_000],
    "many long texts": ["search " * 200] * 1024,
    "ligatures of which 18 characters become": ["ﷺ" * 60_000],
    "many texts of ligatures": ["ﷺ" * 60] * 1024,
}


async def thread_for(texts: list[str]) -> str:
    threads = TokenizerThreads(2)
    try:
        return await threads.run(lambda: threading.current_thread().name, texts)
    finally:
        threads.close()


@pytest.mark.parametrize("texts", USUAL.values(), ids=USUAL)
async def test_usual_texts_share_threads(texts: list[str]) -> None:
    assert not (await thread_for(texts)).startswith("tokenizer-enormous")


@pytest.mark.parametrize("texts", ENORMOUS.values(), ids=ENORMOUS)
async def test_what_takes_seconds_has_a_thread_of_its_own(texts: list[str]) -> None:
    assert (await thread_for(texts)).startswith("tokenizer-enormous")
