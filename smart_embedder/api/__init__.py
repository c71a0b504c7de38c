"""The HTTP API: routers, schemas, rendering, and the table from errors to statuses."""
