"""`python -m smart_embedder_client` is the command `smart-embedder`."""

from smart_embedder_client.cli import main

main()
