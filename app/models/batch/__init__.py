"""Sequences of token ids as one packed row."""
