"""The places of all paths, as the service has them."""

from app.api.handler import paths_of
from app.engine.scheduling.job import Purpose
from app.main import ROUTERS

PATHS = paths_of(ROUTERS)
EMBEDDING_ENDPOINTS = [each.path for each in PATHS.endpoints if each.purpose is Purpose.EMBEDDING]
