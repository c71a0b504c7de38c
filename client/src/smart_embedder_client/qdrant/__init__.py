"""A Qdrant collection with dense, sparse and ColBERT vectors, on a server or in a folder."""
