"""Models on disk and on the hub: files, configuration numbers and tensors."""
