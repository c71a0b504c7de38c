"""The places of all paths, as the service has them."""

from smart_embedder.api.routing import Paths
from smart_embedder.engine.scheduling.job import Purpose
from smart_embedder.main import ROUTERS

PATHS = Paths(ROUTERS)
EMBEDDING_ENDPOINTS = [each.path for each in PATHS.endpoints if each.purpose is Purpose.EMBEDDING]
