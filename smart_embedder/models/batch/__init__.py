"""Batches: sequences of token ids packed into one row."""
