"""The models of MODELS: their states, loading, and the memory that they share."""
