"""uvicorn's names that are no public interface and that `smart_embedder.server` depends on.

Where a release of uvicorn renames one or changes its signature, a test here fails and says which.
What is read and written beside them, the tests of connections and of the server reach.
"""

import inspect

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server

from smart_embedder.server.connection import BoundedConnection, BoundedFlowControl
from smart_embedder.server.server import DrainingServer

SIGNATURES = {
    HttpToolsProtocol: {
        "__init__": ["self", "config", "server_state", "app_state", "_loop"],
        "connection_made": ["self", "transport"],
        "connection_lost": ["self", "exc"],
        "data_received": ["self", "data"],
        "on_url": ["self", "url"],
        "on_header": ["self", "name", "value"],
        "on_body": ["self", "body"],
        "_start_asgi_task": ["self", "cycle", "app"],
        **{
            name: ["self"]
            for name in (
                *("on_message_begin", "on_headers_complete", "on_message_complete"),
                *("on_response_complete", "pause_writing", "resume_writing", "shutdown"),
                *("timeout_keep_alive_handler", "_unset_keepalive_if_required"),
            )
        },
    },
    FlowControl: {
        "__init__": ["self", "transport"],
        "pause_reading": ["self"],
        "resume_reading": ["self"],
    },
    Server: {
        "__init__": ["self", "config"],
        "startup": ["self", "sockets"],
        "main_loop": ["self"],
        "handle_exit": ["self", "sig", "frame"],
    },
}


@pytest.mark.parametrize("owner", SIGNATURES)
def test_a_method_that_is_overridden_or_called_has_its_known_signature(owner: type) -> None:
    found = {
        name: list(inspect.signature(getattr(owner, name)).parameters) for name in SIGNATURES[owner]
    }
    assert found == SIGNATURES[owner]


@pytest.mark.parametrize("own", [BoundedConnection, BoundedFlowControl, DrainingServer])
def test_nothing_of_uvicorns_is_overridden_by_accident(own: type) -> None:
    """A release of uvicorn may add a name that a subclass here already uses."""
    base = own.__mro__[1]
    overridden = {name for name in vars(own) if hasattr(base, name) and name[:2] != "__"}
    assert overridden <= SIGNATURES[base].keys(), f"{base.__name__} has this, too"
