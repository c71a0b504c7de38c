/** The Python program of the view Search, which stores its passages in Qdrant and searches them in the same way. */

import { pythonAsk, pythonImports } from "../core/take.js";
import { CANDIDATES, WEIGHTS } from "./ranking.js";

/** How Qdrant holds vectors of each kind, given as `vectors[kind]` for one text. */
const STORED = {
  dense: `"dense": models.VectorParams(
                size=len(vectors["dense"]), distance=models.Distance.COSINE
            ),`,
  colbert: `"colbert": models.VectorParams(
                size=len(vectors["colbert"][0]),
                distance=models.Distance.COSINE,
                multivector_config=models.MultiVectorConfig(
                    comparator=models.MultiVectorComparator.MAX_SIM
                ),
            ),`,
};

/**
 * `passages` are texts. `options` has further fields of the requests for vectors of the `query` and of
 * `documents`, and for the `scores` of the `reranked` best passages, which is null without a reranker.
 */
export function searchProgram({ query, passages, kinds, options, reranked, shown }) {
  const isMade = (kind) => kinds.includes(kind);
  const configurations = Object.keys(STORED).filter(isMade).map((kind) => STORED[kind]);
  const values = { sparse: `models.SparseVector(**embeddings["sparse"])` };
  const vectors = kinds.map((kind) => `"${kind}": ${values[kind] ?? `embeddings["${kind}"]`},`);
  const isOptional = [options.query, options.documents].some((fields) => Object.keys(fields).length);
  return `"""Stores passages in Qdrant and searches them, as the page of the service does.

pip install "qdrant-client>=1.16"
"""

${pythonImports()}

from qdrant_client import QdrantClient, models

COLLECTION = "passages"
TEXTS_IN_A_REQUEST = 64
WEIGHTS = ${JSON.stringify(WEIGHTS)}


${pythonAsk()}


def embed(texts${isOptional ? ", **options" : ""}):
    """The vectors of each text, by kind."""
    body = {"sentences": texts, "sparse_as_indices": True${isOptional ? ", **options" : ""}}
    return [vectors_of(text["embeddings"]) for text in ask("embeddings", body)["data"]]


def vectors_of(embeddings):
    return {
        ${vectors.join("\n        ")}
    }


def create_collection(qdrant, vectors):
    qdrant.create_collection(
        COLLECTION,
        vectors_config={
            ${configurations.join("\n            ")}
        },
        sparse_vectors_config={${isMade("sparse") ? `"sparse": models.SparseVectorParams()` : ""}},
    )


def store(qdrant, passages):
    for first in range(0, len(passages), TEXTS_IN_A_REQUEST):
        texts = passages[first : first + TEXTS_IN_A_REQUEST]
        points = [
            models.PointStruct(id=first + place, vector=vectors, payload={"text": text})
            for place, (text, vectors) in enumerate(zip(texts, embed(texts${keywords(options.documents)})))
        ]
        if not qdrant.collection_exists(COLLECTION):
            create_collection(qdrant, points[0].vector)
        qdrant.upsert(COLLECTION, points)


def search(qdrant, query):
    """The best passages with their scores: \`(score, text)\`."""
    [vectors] = embed([query]${keywords(options.query)})
    found = qdrant.query_points(
        COLLECTION,
        # The best ${CANDIDATES} by each kind of vector.
        prefetch=[
            models.Prefetch(query=vector, using=kind, limit=${CANDIDATES}) for kind, vector in vectors.items()
        ],
        # Each ranking adds weight / rank.
        query=models.RrfQuery(rrf=models.Rrf(k=1, weights=[WEIGHTS[kind] for kind in vectors])),
        limit=${options.scores ? reranked : shown},
    ).points
${options.scores ? rerankLines(options.scores, shown) : SCORE_LINES}


QUERY = ${JSON.stringify(query)}
PASSAGES = ${JSON.stringify(passages, null, 4)}

qdrant = QdrantClient(":memory:")  # A server: QdrantClient("http://localhost:6333")
store(qdrant, PASSAGES)
for score, text in search(qdrant, QUERY):
    print(f"{score:.3f}  {text}")
`;
}

/** Fields of a request as arguments, and as items of a dict, behind others. */
const keywords = (fields) => listed(fields, (name, value) => `, ${name}=${value}`);
const items = (fields) => listed(fields, (name, value) => `, "${name}": ${value}`);
const listed = (fields, write) =>
  Object.entries(fields).map(([name, text]) => write(name, JSON.stringify(text))).join("");

const SCORE_LINES = `    return [(point.score, point.payload["text"]) for point in found]`;

const rerankLines = (fields, shown) => `    texts = [point.payload["text"] for point in found]
    results = ask("rerank", {"query": query, "passages": texts${items(fields)}})["results"]
    return [(result["score"], result["passage"]) for result in results[:${shown}]]`;
