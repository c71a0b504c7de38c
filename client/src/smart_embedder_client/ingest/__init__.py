"""Load files into a Qdrant collection: read, split, embed, store; a run can be resumed."""
