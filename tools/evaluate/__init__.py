"""Retrieval quality on data of the user's own, with throughput and latency beside it."""
