"""Pipelines: how embedding and reranking requests become results."""
