"""A server with Qdrant's APIs over HTTP and gRPC, with faults that tests set.

No Qdrant server can be installed from a package index. The local engine of `QdrantClient` computes
the responses, so that vectors, filters and queries are real. The server adds what that engine
cannot show: slowness, a full disk, refused points, lost connections.

    python -m tests.support.qdrant.server

It prints its two ports when it accepts connections.
"""

import socket
import sys
import warnings

import uvicorn

from tests.support.qdrant.engine import QdrantEngine
from tests.support.qdrant.grpc_api import start_grpc
from tests.support.qdrant.http import QdrantHttp


def main() -> None:
    """Serve until the process is ended."""
    warnings.filterwarnings("ignore", category=UserWarning)
    engine = QdrantEngine()
    grpc_server, grpc_port = start_grpc(engine)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]} {grpc_port}\n")
        sys.stdout.flush()
        config = uvicorn.Config(QdrantHttp(engine).app(), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])
    grpc_server.stop(None)


if __name__ == "__main__":
    main()
