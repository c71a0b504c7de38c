"""Everything that touches tensors: packing, attention, checkpoints, heads and the forward pass.

Import only `smart_embedder.startup` from outside: it imports torch, which takes seconds, when
it is called.
"""
