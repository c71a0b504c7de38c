"""The defaults that .env.example lists."""

from app.settings import Settings, default
from scripts.settings_docs import COMPOSE_VARIABLES, LIBRARY_VARIABLES


def listed_settings() -> dict[str, str]:
    """Return the default of every setting."""
    return {name.upper(): default(name) for name in Settings.model_fields}


def listed_for_others() -> dict[str, str]:
    """Return the default of every variable that is not a setting."""
    return {
        variable.name: variable.default for variable in (*COMPOSE_VARIABLES, *LIBRARY_VARIABLES)
    }
