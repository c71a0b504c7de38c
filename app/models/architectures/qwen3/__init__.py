"""Decoders of Qwen3's kind."""
