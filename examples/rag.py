"""From files to an answer with citations: hybrid search finds passages, a language model answers.

pip install ./client semantic-text-splitter
python examples/rag.py FOLDER "What does E42 mean?"

FOLDER has texts and Markdown (.txt, .md) in UTF-8. LLM_URL is the address of a language model with
OpenAI's API (Ollama's by default, http://127.0.0.1:11434/v1), LLM_MODEL its model (llama3.2),
LLM_KEY its key if it asks for one. SMART_EMBEDDER_URL and SMART_EMBEDDER_TOKEN say where the
service is, and its token.

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
from semantic_text_splitter import MarkdownSplitter, TextSplitter
from smart_embedder_client import Client, Embeddings, SmartEmbedderError

INSTRUCTIONS = (
    "Answer the question from the numbered passages alone, in a few sentences. After each "
    "statement write the number of its passage in brackets, as in [2]. If they do not answer it, "
    "say so."
)
FOUND, READ = 20, 5
# Of a passage: about 250 tokens of English.
CHARACTERS, OVERLAP = 1_000, 100


@dataclass(frozen=True)
class Passage:
    """A part of a file."""

    source: str
    text: str


def passages_of(folder: Path) -> list[Passage]:
    """The files' texts, cut at headings, paragraphs and sentences."""
    splitters = {
        ".txt": TextSplitter(CHARACTERS, overlap=OVERLAP),
        ".md": MarkdownSplitter(CHARACTERS, overlap=OVERLAP),
    }
    passages = []
    for file in sorted(file for file in folder.rglob("*") if file.suffix in splitters):
        source = file.relative_to(folder).as_posix()
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError) as error:
            print(f"left out {source}: {error}", file=sys.stderr)
            continue
        passages += [Passage(source, chunk) for chunk in splitters[file.suffix].chunks(text)]
    return passages


def fused(vectors: Embeddings, question: Embeddings) -> list[int]:
    """The best passages by meaning and by words, joined by reciprocal rank."""
    (words,) = question.sparse
    wanted = words.as_dict()
    by_meaning = vectors.dense @ question.dense[0]
    by_words = np.array(
        [
            sum(weight * wanted.get(token, 0.0) for token, weight in sparse.as_dict().items())
            for sparse in vectors.sparse
        ]
    )
    scores: dict[int, float] = defaultdict(float)
    # A place by meaning counts three times one by words.
    for weight, ranking in ((3, by_meaning), (1, np.where(by_words > 0, by_words, -np.inf))):
        for rank, index in enumerate(np.argsort(-ranking, kind="stable")[:100], start=1):
            if np.isfinite(ranking[index]):
                scores[int(index)] += weight / rank
    return sorted(scores, key=scores.__getitem__, reverse=True)[:FOUND]


def search(passages: list[Passage], service: Client, question: str) -> list[Passage]:
    """What the model reads: the best passages in the reranker's order."""
    vectors = service.embed_documents([passage.text for passage in passages], normalize_dense=True)
    query = service.embed_query(question, normalize_dense=True)
    found = [passages[index] for index in fused(vectors, query)]
    ranking = service.rerank(question, [passage.text for passage in found])
    return [found[index] for index in ranking.indices[:READ]]


def chat(*messages: dict[str, str]) -> str:
    """The language model's reply; the program ends with a sentence where it gives none."""
    url = os.environ.get("LLM_URL", "http://127.0.0.1:11434/v1").rstrip("/")
    key = os.environ.get("LLM_KEY")
    try:
        response = httpx.post(
            f"{url}/chat/completions",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            json={
                "model": os.environ.get("LLM_MODEL", "llama3.2"),
                "temperature": 0,
                "messages": messages,
            },
            timeout=300,
        )
        response.raise_for_status()
        return response.json()["choices"][0]["message"]["content"].strip()
    except httpx.HTTPStatusError:
        problem = f"{response.status_code}: {response.text[:200]}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem = str(error)
    except (AttributeError, LookupError, TypeError, ValueError):
        problem = "the response is not that of OpenAI's API"
    sys.exit(f"The language model at {url} (LLM_URL) does not answer: {problem}")


def ask(question: str, passages: list[Passage]) -> str:
    """The language model's answer."""
    numbered = "\n\n".join(f"[{i}] {passage.text}" for i, passage in enumerate(passages, start=1))
    return chat(
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": f"{numbered}\n\nQuestion: {question}"},
    )


def with_sources(answer: str, passages: list[Passage]) -> str:
    """The answer, and below it the files that it cites; numbers that no passage has are told."""
    cited = " ".join(re.findall(r"\[([\d, ]+)\]", answer))
    numbers = sorted({int(number) for number in re.findall(r"\d+", cited)})
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
    passages = passages_of(folder)
    if not passages:
        sys.exit(f"{folder} has no text in .txt or .md files")
    # Before all passages are embedded, which may take long.
    chat({"role": "user", "content": "Reply with OK."})
    try:
        with Client() as service:
            best = search(passages, service, question)
    except SmartEmbedderError as error:
        sys.exit(str(error))
    print(with_sources(ask(question, best), best))
