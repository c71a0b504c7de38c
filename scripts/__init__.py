"""Programs for whoever changes the service: `python -m scripts.NAME`."""
