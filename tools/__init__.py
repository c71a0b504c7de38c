"""Programs beside the service: a smoke test, a comparison with references, a demo model."""
