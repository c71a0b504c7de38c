"""The places of all paths, as the service has them."""

from app.main import ROUTERS
from app.routing import Paths
from smart_embedder.requests import Purpose

PATHS = Paths(ROUTERS)
EMBEDDING_ENDPOINTS = [each.path for each in PATHS.endpoints if each.purpose is Purpose.EMBEDDING]
