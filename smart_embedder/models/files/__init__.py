"""The files of models, on disk and on the hub: configurations and weights."""
