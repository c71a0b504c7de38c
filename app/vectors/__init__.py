"""What is made of a model's vectors before they travel: fewer bits, fewer vectors, one vector."""
