"""Benchmarks that anyone can repeat, on random checkpoints of the true shapes."""
