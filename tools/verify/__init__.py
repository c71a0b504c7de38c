"""Parity: this engine against the reference implementations, on the user's own models."""
