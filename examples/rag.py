"""Answer a question from files, with citations: hybrid search, and a language model.

pip install ./client semantic-text-splitter
python examples/rag.py FOLDER "What does E42 mean?"

FOLDER has texts and Markdown (.txt, .md) in UTF-8. LLM_URL is the address of a language model with
OpenAI's API (Ollama's by default, http://127.0.0.1:11434/v1), LLM_MODEL its model (llama3.2),
LLM_KEY its key if it has one. SMART_EMBEDDER_URL is the address of the service,
SMART_EMBEDDER_TOKEN its access token if it has one.

Each run embeds all files, and keeps the vectors in memory. For more than a few hundred files, fill
a Qdrant collection with `smart-embedder ingest`, and search there.
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
CANDIDATES, CONTEXT_PASSAGES = 20, 5
# The length of a passage, about 250 tokens of English, and what it repeats of the one before.
CHARACTERS, OVERLAP = 1_000, 100


@dataclass(frozen=True)
class Passage:
    """A part of a file."""

    source: str
    text: str


def read_passages(folder: Path) -> list[Passage]:
    """Read the files, and split them at headings, paragraphs and sentences."""
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


def fuse(vectors: Embeddings, question: Embeddings) -> list[int]:
    """Return the best passages by reciprocal rank fusion of dense and sparse scores."""
    weights = question.sparse[0].as_dict()
    dense = vectors.dense @ question.dense[0]
    sparse = np.array(
        [
            sum(weight * weights.get(token, 0.0) for token, weight in vector.as_dict().items())
            for vector in vectors.sparse
        ]
    )
    fused: dict[int, float] = defaultdict(float)
    # A dense rank counts three times a sparse one.
    for weight, scores in ((3, dense), (1, np.where(sparse > 0, sparse, -np.inf))):
        for rank, index in enumerate(np.argsort(-scores, kind="stable")[:100], start=1):
            if np.isfinite(scores[index]):
                fused[int(index)] += weight / rank
    return sorted(fused, key=fused.__getitem__, reverse=True)[:CANDIDATES]


def search(passages: list[Passage], service: Client, question: str) -> list[Passage]:
    """Return the passages for the language model, sorted by the reranker."""
    vectors = service.embed_documents([passage.text for passage in passages], normalize_dense=True)
    query = service.embed_query(question, normalize_dense=True)
    found = [passages[index] for index in fuse(vectors, query)]
    ranking = service.rerank(question, [passage.text for passage in found])
    return [found[index] for index in ranking.indices[:CONTEXT_PASSAGES]]


def chat(*messages: dict[str, str]) -> str:
    """Return the language model's reply; exit with a sentence if there is none."""
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
    """Let the language model answer the question from the passages."""
    numbered = "\n\n".join(f"[{i}] {passage.text}" for i, passage in enumerate(passages, start=1))
    return chat(
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": f"{numbered}\n\nQuestion: {question}"},
    )


def add_sources(answer: str, passages: list[Passage]) -> str:
    """Add the cited files to the answer, with a warning for citations that do not exist."""
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
    passages = read_passages(folder)
    if not passages:
        sys.exit(f"{folder} has no text in .txt or .md files")
    # Fail before all passages are embedded, which may take long.
    chat({"role": "user", "content": "Reply with OK."})
    try:
        with Client() as service:
            best = search(passages, service, question)
    except SmartEmbedderError as error:
        sys.exit(str(error))
    print(add_sources(ask(question, best), best))
