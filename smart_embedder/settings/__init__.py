"""Settings: of the engine, of the service, and of models in a file."""
