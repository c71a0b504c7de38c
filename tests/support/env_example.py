"""What .env.example lists, which a test holds to be made of the declarations."""

from smart_embedder.settings import Settings
from smart_embedder.settings.declaration import default
from smart_embedder.settings.sources import COMPOSE_VARIABLES


def listed_settings() -> dict[str, str]:
    """The default of every setting."""
    return {name.upper(): default(name) for name in Settings.model_fields}


def listed_for_others() -> dict[str, str]:
    """The default of every variable that the service does not read."""
    return {variable.name: variable.default for variable in COMPOSE_VARIABLES}
