"""The places of all paths, as the service has them."""

from smart_embedder.api.openapi import paths_of
from smart_embedder.engine.scheduling.job import Purpose
from smart_embedder.main import ROUTERS

PATHS = paths_of(ROUTERS)
EMBEDDING_ENDPOINTS = [each.path for each in PATHS.endpoints if each.purpose is Purpose.EMBEDDING]
