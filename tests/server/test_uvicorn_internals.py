"""uvicorn's names that are no public interface and that `smart_embedder.server` depends on.

Where a release of uvicorn renames one or changes its signature, a test here fails and says which.
"""

import asyncio
import inspect
import signal

import pytest
import uvicorn
import uvicorn._types
from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http import flow_control
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from smart_embedder.server.connection import BoundedConnection, BoundedFlowControl
from smart_embedder.server.server import DrainingServer

SIGNATURES = {
    (HttpToolsProtocol, "__init__"): ["self", "config", "server_state", "app_state", "_loop"],
    (HttpToolsProtocol, "connection_made"): ["self", "transport"],
    (HttpToolsProtocol, "connection_lost"): ["self", "exc"],
    (HttpToolsProtocol, "data_received"): ["self", "data"],
    (HttpToolsProtocol, "on_message_begin"): ["self"],
    (HttpToolsProtocol, "on_url"): ["self", "url"],
    (HttpToolsProtocol, "on_header"): ["self", "name", "value"],
    (HttpToolsProtocol, "on_headers_complete"): ["self"],
    (HttpToolsProtocol, "on_body"): ["self", "body"],
    (HttpToolsProtocol, "on_message_complete"): ["self"],
    (HttpToolsProtocol, "on_response_complete"): ["self"],
    (HttpToolsProtocol, "pause_writing"): ["self"],
    (HttpToolsProtocol, "resume_writing"): ["self"],
    (HttpToolsProtocol, "timeout_keep_alive_handler"): ["self"],
    (HttpToolsProtocol, "shutdown"): ["self"],
    (HttpToolsProtocol, "_start_asgi_task"): ["self", "cycle", "app"],
    (HttpToolsProtocol, "_unset_keepalive_if_required"): ["self"],
    (FlowControl, "__init__"): ["self", "transport"],
    (FlowControl, "pause_reading"): ["self"],
    (FlowControl, "resume_reading"): ["self"],
    (Server, "__init__"): ["self", "config"],
    (Server, "startup"): ["self", "sockets"],
    (Server, "main_loop"): ["self"],
    (Server, "handle_exit"): ["self", "sig", "frame"],
}

CONNECTION = ("connections", "client", "cycle", "flow", "headers", "loop", "parser", "pipeline")
CONNECTION += ("scope", "timeout_keep_alive_task", "transport")
CYCLE = ("body", "disconnected", "flow", "keep_alive", "message_event", "more_body")
CYCLE += ("response_complete", "response_started", "chunked_encoding")
SERVER = ("config", "server_state", "should_exit", "started")


@pytest.fixture
def config() -> uvicorn.Config:
    return uvicorn.Config(lambda: None, lifespan="off", log_config=None)


@pytest.fixture
async def connection(config) -> HttpToolsProtocol:
    return HttpToolsProtocol(config, ServerState(), {})


@pytest.fixture
async def cycle(connection) -> RequestResponseCycle:
    needed = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    return RequestResponseCycle(**needed | {"keep_alive": True, "expect_100_continue": False})


def missing(thing: object, names: tuple[str, ...]) -> list[str]:
    return [f"{type(thing).__name__}.{name}" for name in names if not hasattr(thing, name)]


@pytest.mark.parametrize(("owner", "name"), SIGNATURES)
def test_a_method_that_is_overridden_or_called_has_its_known_signature(owner, name) -> None:
    method = getattr(owner, name, None)
    assert method, f"uvicorn has no {owner.__name__}.{name} any more: smart_embedder.server uses it"
    found = list(inspect.signature(method).parameters)
    expected = SIGNATURES[owner, name]
    assert found == expected, (
        f"uvicorn changed {owner.__name__}.{name}: smart_embedder.server uses it"
    )


@pytest.mark.parametrize("own", [BoundedConnection, BoundedFlowControl, DrainingServer])
def test_nothing_of_uvicorns_is_overridden_by_accident(own: type) -> None:
    """A release of uvicorn may add a name that a subclass here already uses."""
    base = own.__mro__[1]
    intended = {name for owner, name in SIGNATURES if owner is base}
    overridden = {name for name in vars(own) if hasattr(base, name) and name[:2] != "__"}
    assert overridden <= intended, f"{base.__name__} has this, too"


def test_a_connection_has_the_attributes_that_are_read_and_written(connection) -> None:
    assert missing(connection, CONNECTION) == [], "smart_embedder.server.connection uses these"
    assert isinstance(connection.parser, HttpRequestParser)
    connection.on_message_begin()
    assert connection.url == b""
    assert connection.headers == []
    assert connection.scope["state"] == {}


def test_a_cycle_has_the_attributes_that_are_read_and_written(cycle) -> None:
    assert missing(cycle, CYCLE) == [], "smart_embedder.server.connection uses these"
    assert cycle.more_body
    assert not any((cycle.disconnected, cycle.response_started, cycle.response_complete))


async def test_flow_control_has_the_attributes_that_are_read() -> None:
    assert missing(FlowControl(asyncio.Transport()), ("write_paused", "read_paused")) == []
    assert flow_control.HIGH_WATER_LIMIT == 65_536


def test_a_server_has_the_attributes_that_are_read_and_written(config) -> None:
    server = uvicorn.Server(config)
    assert missing(server, SERVER) == [], "smart_embedder.server.server uses these"
    assert missing(server.server_state, ("connections",)) == []
    assert "self.servers" in inspect.getsource(Server.startup), (
        "DrainingServer reads Server.servers"
    )
    assert missing(config, ("timeout_graceful_shutdown",)) == []
    assert hasattr(uvicorn._types, "ASGI3Application")


async def test_a_started_server_shows_its_listening_sockets(config) -> None:
    config.port = 0
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        (listener,) = [each for one in server.servers for each in one.sockets]
        assert listener.getsockname()[1] > 0, "DrainingServer.url reads it"
        assert listener.fileno() > 0, "DrainingServer filters it"
    finally:
        await server.shutdown()


def test_uvicorn_installs_its_method_as_the_signal_handler(config) -> None:
    """A failed start finds the `uvicorn` command's server through the handler."""
    server = uvicorn.Server(config)
    before = signal.getsignal(signal.SIGTERM)
    with server.capture_signals():
        handler = signal.getsignal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    assert getattr(handler, "__self__", None) is server, (
        "smart_embedder.server.process relies on it"
    )


def test_the_parser_reports_an_upgrade_and_where_the_rest_begins() -> None:
    parser = HttpRequestParser(object())
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    head = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with pytest.raises(HttpParserUpgrade) as upgrade:
        parser.feed_data(head + b"rest")
    assert upgrade.value.args[0] == len(head)
    assert (parser.get_method(), parser.get_http_version()) == (b"POST", "1.1")
