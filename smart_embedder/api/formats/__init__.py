"""The formats that vectors are answered in, each a renderer of the same answer."""
