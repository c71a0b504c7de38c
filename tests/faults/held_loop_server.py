"""The whole service, and a request that holds its event loop.

python -m tests.faults.held_loop_server

`POST /hold` computes for so many seconds as its body says.
"""

import time

from starlette.requests import Request
from starlette.responses import Response

from smart_embedder.main import create_app
from smart_embedder.server.process import run


async def hold(request: Request) -> Response:
    compute(float(await request.body()))
    return Response()


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def create(*arguments, **options):
    app = create_app(*arguments, **options)
    app.router.add_route("/hold", hold, methods=["POST"])
    return app


if __name__ == "__main__":
    run(create)
