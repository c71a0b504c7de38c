"""Qdrant's API over HTTP and gRPC, in front of its own engine in Python, told when to fail.

No Qdrant server can be installed from a package index. What is asked of this one is answered by
`QdrantClient` with a local engine, so that vectors, filters and queries are real; what it adds is
what that engine cannot show: a slow server, a full one, one that refuses a point, one that is away.

    python -m tests.support.qdrant.server

It prints its two ports when it accepts connections.
"""

import socket
import sys
import warnings

import uvicorn

from tests.support.qdrant.engine import Engine
from tests.support.qdrant.grpc_api import start_grpc
from tests.support.qdrant.http import HTTP


def main() -> None:
    """Serve until the process is ended."""
    warnings.filterwarnings("ignore", category=UserWarning)
    engine = Engine()
    grpc_server, grpc_port = start_grpc(engine)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]} {grpc_port}\n")
        sys.stdout.flush()
        config = uvicorn.Config(HTTP(engine).app(), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])
    grpc_server.stop(None)


if __name__ == "__main__":
    main()
