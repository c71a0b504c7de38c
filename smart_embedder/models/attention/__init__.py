"""Attention over a packed batch: several kernels behind one signature."""
