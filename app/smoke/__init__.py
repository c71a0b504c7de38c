"""A walk through the whole contract against a running server; see `app.smoke.__main__`."""
