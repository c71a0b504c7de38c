"""docs/new-model.md: a collection and a service change their model, and no search is lost.

A client searches through the project's Caddy all the time. It asks for texts of the collection, so
each text must be its own nearest neighbour, whichever model served the query.
"""

import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import httpx2

from tests.client.ingest.conftest import Runs, make_runs, make_target
from tests.client.ingest.test_from_collection import copy_collection, read_payloads
from tests.support.checkpoints import save_m3
from tests.support.proxies import LIMIT, NAME, run_caddy
from tests.support.qdrant.process import QdrantServer
from tests.support.replica import Replica
from tests.support.waiting import wait_until


@dataclass
class Searcher:
    """Searches for the texts one after another, in the collection of each answer's space."""

    url: str
    qdrant: str
    texts: list[str]
    sent: int = 0
    found: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx2.Client(verify=False, timeout=LIMIT) as client:
            while not self.stopped.wait(0.005):
                text = self.texts[self.sent % len(self.texts)]
                self.sent += 1
                try:
                    self._search(client, text)
                except (httpx2.HTTPError, KeyError) as error:
                    self.wrong.append(repr(error))

    def _search(self, client: httpx2.Client, text: str) -> None:
        body = {"sentences": [text], "return_sparse": False, "return_colbert": False}
        answer = client.post(f"{self.url}/embeddings/", json=body, headers={"Host": NAME})
        space = answer.raise_for_status().headers["Vector-Space"]
        vector = answer.json()["data"][0]["embeddings"]["dense"]
        query = {"query": vector, "using": "dense", "limit": 1, "with_payload": True}
        hits = client.post(
            f"{self.qdrant}/collections/docs-{space}/points/query/batch", json={"searches": [query]}
        )
        (hit,) = hits.raise_for_status().json()["result"][0]["points"]
        if hit["payload"]["text"] == text:
            self.found[space] += 1
        else:
            self.wrong.append(text)

    def wait_for_more(self, space: str, count: int = 20) -> None:
        goal = self.found[space] + count
        wait_until(lambda: self.found[space] >= goal or bool(self.wrong), f"no search in {space}")


def name_by_space(runs: Runs) -> str:
    """Give the collection the alias of its vector space, and return the space."""
    space = runs.query_store(lambda store: store.origin()).vector_space["dense"]
    named = {"collection_name": runs.target.collection, "alias_name": f"docs-{space}"}
    actions = {"actions": [{"create_alias": named}]}
    httpx2.post(f"{runs.target.address}/collections/aliases", json=actions).raise_for_status()
    return str(space)


def read_texts(runs: Runs) -> list[str]:
    return sorted(payload["text"] for payload in read_payloads(runs).values())


def test_no_search_is_lost_while_the_model_changes(
    qdrant: QdrantServer, tiny_m3: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for subject, place in product(("pump", "lid", "train", "music"), ("winter", "river", "bread")):
        (folder / f"{subject}-{place}.txt").write_text(f"The {subject} in the {place} is open.")
    other_m3 = save_m3(tmp_path / "other-m3", layers=1)
    with ExitStack() as ending:
        old, new, entering = (Replica(tmp_path, model) for model in (tiny_m3, other_m3, other_m3))
        for replica in (old, new, entering):
            ending.callback(replica.end)
        server = old.start().server
        assert server is not None
        before = make_runs(server, make_target("http", tmp_path, qdrant), folder, tmp_path)
        before.run()
        old_space = name_by_space(before)
        url = ending.enter_context(run_caddy(tmp_path, f"{old.address} {entering.address}"))
        with httpx2.Client(base_url=url, headers={"Host": NAME}, verify=False) as client:
            wait_until(lambda: _is_served(client), "Caddy never had its certificate")
        searcher = Searcher(url, qdrant.url, read_texts(before))
        searching = threading.Thread(target=searcher.run)
        searching.start()
        ending.callback(searching.join, LIMIT)
        ending.callback(searcher.stopped.set)
        searcher.wait_for_more(old_space)

        # The new model beside the old one, and a first copy.
        target = replace(before.target, collection=f"{before.target.collection}-2")
        server = new.start().server
        assert server is not None
        after = replace(before, url=server.url, target=target, journal=tmp_path / "journal-2")
        copy_collection(before, after)
        # A text of before the writers store in both collections, one of after, and a second copy.
        (folder / "early.txt").write_text("The train is blocked.")
        before.run()
        (folder / "late.txt").write_text("The bread is open in winter.")
        for runs in (before, after):
            runs.run()
        copy_collection(before, after)
        assert read_texts(after) == read_texts(before)
        searcher.texts = read_texts(after)
        new_space = name_by_space(after)
        assert new_space != old_space
        # Both models serve, then the new one alone.
        entering.start()
        searcher.wait_for_more(new_space)
        searcher.wait_for_more(old_space)
        old.stop()
        searcher.wait_for_more(new_space)
        searcher.stopped.set()
        searching.join(LIMIT)
    assert not searcher.wrong
    assert searcher.found.total() == searcher.sent
    assert searcher.found.keys() == {old_space, new_space}


def _is_served(client: httpx2.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx2.TransportError:
        return False
