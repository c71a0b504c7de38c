"""The service: the engine over HTTP, with FastAPI. `python -m app` starts it."""
