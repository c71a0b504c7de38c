"""What .env.example lists, which a test holds to be made of the declarations."""

from app.settings import Settings
from app.settings.declaration import default
from app.settings.sources import COMPOSE_VARIABLES


def listed_settings() -> dict[str, str]:
    """The default of every setting."""
    return {name.upper(): default(name) for name in Settings.model_fields}


def listed_for_others() -> dict[str, str]:
    """The default of every variable that the service does not read."""
    return {variable.name: variable.default for variable in COMPOSE_VARIABLES}
