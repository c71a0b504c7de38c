"""Examples for the API's description, and short ones for its errors."""

from pydantic import JsonValue

EMBEDDING_REQUEST: dict[str, JsonValue] = {
    "sentences": ["What is hybrid search?", "It joins meaning and exact words in one ranking."],
    "return_colbert": False,
}

RERANK_REQUEST: dict[str, JsonValue] = {
    "query": "What is hybrid search?",
    "passages": ["A recipe for bread.", "It joins meaning and exact words in one ranking."],
}

EMBEDDING_EXAMPLE: dict[str, JsonValue] = {"sentences": ["What is hybrid search?"]}
RERANK_EXAMPLE: dict[str, JsonValue] = {
    "query": "What is hybrid search?",
    "passages": ["A recipe for bread.", "It joins two rankings."],
}
WEIGHTS_EXAMPLE: dict[str, JsonValue] = {"dense": 1, "sparse": 0.5, "colbert": 1}
