"""The demo: a checkpoint of bge-m3's shape from a small real model, without a model hub."""
