"""Retrieval quality of a running service on your own data."""
