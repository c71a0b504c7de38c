"""Programs for developers of the service: `python -m scripts.NAME`."""
