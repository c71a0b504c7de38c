"""Checks of a running server; see `tools.smoke.__main__`."""
