"""Rerankers: score a passage by reading it together with the query."""
