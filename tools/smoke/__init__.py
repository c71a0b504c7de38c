"""A walk through the whole contract against a running server; see `tools.smoke.__main__`."""
