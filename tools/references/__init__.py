"""The implementations that this service is compared with, each on the same files.

`tools.verify` compares numbers with them, `tools.evaluate` retrieval quality and speed.
"""
