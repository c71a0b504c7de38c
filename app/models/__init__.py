"""Everything that touches tensors: packing, attention, checkpoints, heads and the forward pass.

Only `app.engine.loading` reaches in here, from the device thread, because importing torch takes
seconds and the port must answer before that.
"""
