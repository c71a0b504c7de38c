"""Post-processing of vectors: quantization, pooling of ColBERT vectors, MUVERA."""
