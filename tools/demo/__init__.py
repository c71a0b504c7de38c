"""The demo: a small real model, made into a checkpoint of bge-m3's shape without a model hub."""
