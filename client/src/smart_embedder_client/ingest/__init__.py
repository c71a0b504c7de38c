"""Files into a Qdrant collection: read, split into chunks, embed, store, and go on after a kill."""
