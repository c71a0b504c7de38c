"""Requests: each kind has a pipeline, from its options to its results."""
