"""Run the command `smart-embedder` with `python -m smart_embedder_client`."""

from smart_embedder_client.cli import main

main()
