"""What start_server.sh and start_server.bat share: from their arguments to a running server.

It runs before anything is installed, so it knows only the standard library, and of `smart_embedder`
only what does the same.
"""
