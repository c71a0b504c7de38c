"""The service's names in a checkout before it was a package: `app.main:app`, `python -m app`."""
