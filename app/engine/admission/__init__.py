"""Before the queue: limits of concurrency, tokenisation, and what was truncated."""
