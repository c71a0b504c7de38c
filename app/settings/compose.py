"""The variables in .env that are for docker compose: the service accepts and ignores them."""

from typing import NamedTuple


class ComposeVariable(NamedTuple):
    """A variable of the compose files, or of compose itself, with its default there."""

    name: str
    default: str
    description: str


COMPOSE_VARIABLES = (
    ComposeVariable(
        "MEMORY_LIMIT",
        "16g",
        "the most memory of the service; above it, its container is ended and started again",
    ),
    ComposeVariable("MONITORING_MEMORY_LIMIT", "1g", "the same for Prometheus and for Grafana"),
    ComposeVariable("QDRANT_MEMORY_LIMIT", "4g", "the same for Qdrant"),
    ComposeVariable("PIDS_LIMIT", "2048", "the most threads of a container"),
    ComposeVariable(
        "STOP_GRACE_PERIOD",
        "40s",
        "how long compose waits before it kills; it must be above `SHUTDOWN_TIMEOUT`",
    ),
    ComposeVariable(
        "HF_CACHE_VOLUME", "smart-embedder-hf-cache", "the volume of downloaded models"
    ),
    ComposeVariable(
        "MODELS_FOLDER",
        "./deploy/models",
        "the folder that is mounted read-only at `/models`: for models that are folders, and for "
        "the file of `MODELS`; in the settings their paths begin with `/models`",
    ),
    ComposeVariable("PROMETHEUS_PORT", "9090", "the port of Prometheus on this machine"),
    ComposeVariable("GRAFANA_PORT", "3000", "the port of Grafana on this machine"),
    ComposeVariable("QDRANT_PORT", "6333", "the port of Qdrant's REST API on this machine"),
    ComposeVariable("QDRANT_GRPC_PORT", "6334", "the port of Qdrant's gRPC API on this machine"),
    ComposeVariable("QDRANT__SERVICE__API_KEY", "", "the key that Qdrant asks its clients for"),
    ComposeVariable("COMPOSE_FILE", "", "the same as compose's flag -f"),
    ComposeVariable("COMPOSE_PROFILES", "", "the same as compose's flag --profile"),
    ComposeVariable("COMPOSE_PROJECT_NAME", "smart-embedder", "the same as compose's flag -p"),
)
