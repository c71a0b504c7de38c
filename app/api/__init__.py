"""The HTTP face: routers, schemas, rendering and the one table from errors to statuses."""
