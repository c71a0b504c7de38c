"""Heads: compute vectors from the hidden states of a transformer."""
