"""Tries every text encoder and cross-encoder of transformers with the engine, on tiny models."""
