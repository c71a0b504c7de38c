"""Models: the files of a checkpoint, its tokenizer, its layers, and its heads.

Other packages import `smart_embedder.startup`, which imports torch, and so takes seconds, only when
it is called.
"""
