"""Devices: which one, how many threads and tokens, and copies from it."""
