"""Compare this engine with the reference implementations, and two servers with each other."""
