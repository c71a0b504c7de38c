"""The port, tried before minutes are spent on what would end at a taken one."""

from collections.abc import Mapping

from app.errors import StartupError
from app.server.ports import require_port
from launcher.console import LaunchError

_HIGHEST = 65535


def port_of(settings: Mapping[str, str]) -> int:
    """Return the port that the settings name, as the app and the compose files read it."""
    text = settings.get("PORT", "8000").strip()
    if not (text.isascii() and text.isdecimal() and int(text) <= _HIGHEST):
        raise LaunchError(f"PORT={text} is not a port: it is a number from 0 to {_HIGHEST}.")
    return int(text)


def require_free_port(host: str, port: int) -> None:
    """Raise `LaunchError` where nobody could listen on the port."""
    try:
        require_port(host, port)
    except StartupError as error:
        raise LaunchError(f"{error}.") from error
