"""The transformer of a model: one of `architectures`, or transformers' modules."""
