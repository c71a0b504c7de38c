"""The service's connections around an app that says yes: `python -m tests.faults.plain_server`.

One thread and nothing in the background, so that nothing but a client's request wakes the loop.
"""

import uvicorn

from smart_embedder.server.connection import bounded_connection


async def say_yes(scope, receive, send) -> None:
    if scope["type"] == "http":
        length = [(b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"yes"})


if __name__ == "__main__":
    http = bounded_connection(90, lambda: False)
    uvicorn.run(say_yes, port=0, lifespan="off", access_log=False, loop="uvloop", http=http)
