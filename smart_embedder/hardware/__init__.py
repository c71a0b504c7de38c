"""The GPUs and processors that models run on, their memory, and copies from device to host."""
