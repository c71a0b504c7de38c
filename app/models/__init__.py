"""Everything that touches tensors: packing, attention, checkpoints, heads and the forward pass.

`app.models.load` is the way in: importing torch takes seconds, and the port must answer before.
"""
