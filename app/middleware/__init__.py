"""Pure ASGI middleware; `app.main` puts it in order."""
