"""From files to an answer with citations: hybrid search finds passages, a language model answers.

pip install ./client
python examples/rag.py FOLDER "What does E42 mean?"

FOLDER has texts and Markdown (.txt, .md). LLM_URL is the address of a language model with OpenAI's
API (Ollama's by default, http://127.0.0.1:11434/v1), LLM_MODEL its model (llama3.2), LLM_KEY its
key if it asks for one. SMART_EMBEDDER_URL and SMART_EMBEDDER_TOKEN say where the service is, and
its token.

Vectors are kept in memory and made anew by each run. For more files than a few hundred, fill a
Qdrant collection by `smart-embedder ingest` and search there.
"""

import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from smart_embedder_client import Client, Embeddings
from smart_embedder_client.ingest.chunking import ServiceChunker

INSTRUCTIONS = (
    "Answer the question from the numbered passages alone, in a few sentences. After each "
    "statement write the number of its passage in brackets, as in [2]. If they do not answer it, "
    "say so."
)
FOUND, READ = 20, 5


@dataclass(frozen=True)
class Passage:
    """A part of a file."""

    source: str
    text: str


def passages_of(folder: Path, service: Client) -> list[Passage]:
    """The files' texts, cut at headings, paragraphs and sentences."""
    chunker = ServiceChunker(service.count_tokens, tokens=256, overlap=32)
    files = sorted(file for file in folder.rglob("*") if file.suffix in {".txt", ".md"})
    return [
        Passage(file.relative_to(folder).as_posix(), chunk)
        for file in files
        for chunk in chunker.split(
            file.read_text(encoding="utf-8"), is_markdown=file.suffix == ".md"
        )
    ]


def fused(vectors: Embeddings, question: Embeddings) -> list[int]:
    """The best passages by meaning and by words, joined by reciprocal rank."""
    (words,) = question.sparse
    wanted = words.as_dict()
    by_meaning = vectors.dense @ question.dense[0]
    by_words = np.array(
        [
            sum(weight * wanted.get(i, 0.0) for i, weight in each.as_dict().items())
            for each in vectors.sparse
        ]
    )
    scores: dict[int, float] = defaultdict(float)
    for ranking in (by_meaning, np.where(by_words > 0, by_words, -np.inf)):
        for rank, index in enumerate(np.argsort(-ranking, kind="stable")[:100], start=1):
            if np.isfinite(ranking[index]):
                scores[int(index)] += 1 / (60 + rank)
    return sorted(scores, key=scores.__getitem__, reverse=True)[:FOUND]


def search(passages: list[Passage], service: Client, question: str) -> list[Passage]:
    """What the model reads: the best passages in the reranker's order."""
    vectors = service.embed_documents([each.text for each in passages], normalize_dense=True)
    query = service.embed_query(question, normalize_dense=True)
    found = [passages[index] for index in fused(vectors, query)]
    ranking = service.rerank(question, [each.text for each in found])
    return [found[index] for index in ranking.indices[:READ]]


def ask(question: str, passages: list[Passage]) -> str:
    """The language model's answer."""
    numbered = "\n\n".join(f"[{i}] {each.text}" for i, each in enumerate(passages, start=1))
    key = os.environ.get("LLM_KEY")
    answer = httpx.post(
        os.environ.get("LLM_URL", "http://127.0.0.1:11434/v1").rstrip("/") + "/chat/completions",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        json={
            "model": os.environ.get("LLM_MODEL", "llama3.2"),
            "temperature": 0,
            "messages": [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": f"{numbered}\n\nQuestion: {question}"},
            ],
        },
        timeout=300,
    )
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"].strip()


def with_sources(answer: str, passages: list[Passage]) -> str:
    """The answer, and below it the files that it cites; numbers that no passage has are told."""
    cited = " ".join(re.findall(r"\[([\d, ]+)\]", answer))
    numbers = sorted({int(each) for each in re.findall(r"\d+", cited)})
    lines = [
        f"[{number}] {passages[number - 1].source}"
        if 1 <= number <= len(passages)
        else f"[{number}] is no passage that the model was given: do not trust it."
        for number in numbers
    ]
    return "\n".join([answer, "", *(lines or ["No passage is cited: do not trust it."])])


if __name__ == "__main__":
    if len(sys.argv) != len(["rag.py", "FOLDER", "QUESTION"]):
        sys.exit(__doc__)
    folder, question = Path(sys.argv[1]), sys.argv[2]
    with Client() as service:
        passages = passages_of(folder, service)
        if not passages:
            sys.exit(f"{folder} has no text in .txt or .md files")
        best = search(passages, service, question)
    print(with_sources(ask(question, best), best))
