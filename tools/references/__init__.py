"""The implementations that `tools.verify` and `benchmarks.rerankers` compare with."""
