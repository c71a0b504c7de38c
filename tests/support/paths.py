"""The paths of the service."""

from app.main import ROUTERS
from app.routing import Paths
from smart_embedder.requests import Purpose

PATHS = Paths(ROUTERS)
EMBEDDING_ENDPOINTS = [
    endpoint.path for endpoint in PATHS.endpoints if endpoint.purpose is Purpose.EMBEDDING
]
