"""The service's own endpoints: embeddings, streams, rerank, health, statistics, docs, the page."""
