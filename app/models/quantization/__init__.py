"""Matrix products in 8 bits on a CPU."""
