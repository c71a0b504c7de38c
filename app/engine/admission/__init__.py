"""Before the queue: places, tokenisation, and what was truncated."""
