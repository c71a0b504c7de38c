"""Whose request it is: the one rule by which clients are told apart.

The rate limit, the bound on held memory and the engine's fairness all count by it.
"""

from starlette.types import Scope

from app.access.api_tokens import DEFAULT_NAME


def client_key(scope: Scope) -> str:
    """`token:NAME` where a named token was shown, else `address:` and the client's address.

    A named token is one client wherever it comes from; the single API_TOKEN, no token and a wrong
    one are told apart by address. `app.middleware.client.NoteClient` must have seen the request.
    """
    state = scope["state"]
    name = state.get("token_name", DEFAULT_NAME)
    return f"address:{state['client_address']}" if name == DEFAULT_NAME else f"token:{name}"
