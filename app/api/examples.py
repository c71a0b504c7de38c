"""Examples for the API's description."""

from pydantic import JsonValue

EMBEDDING_REQUEST: dict[str, JsonValue] = {
    "sentences": ["What is hybrid search?", "It joins meaning and exact words in one ranking."],
    "return_colbert": False,
}

RERANK_REQUEST: dict[str, JsonValue] = {
    "query": "What is hybrid search?",
    "passages": ["A recipe for bread.", "It joins meaning and exact words in one ranking."],
}
