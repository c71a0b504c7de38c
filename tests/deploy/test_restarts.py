"""Requests behind the project's Caddyfile while processes are replaced: none is lost.

Two processes stand for the containers of compose; `docker` is a script that replaces one of them.
"""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from tests.faults.tally import EMBED, Tally
from tests.support.proxies import LIMIT, NAME, run_caddy
from tests.support.replica import Replica
from tests.support.server import REPOSITORY
from tests.support.waiting import wait_until

# Seconds between two requests, so that they leave the processor to those who start.
PAUSE = 0.005
# Sends the arguments to the test, and waits until it has done what they say.
DOCKER = """\
#!{python}
import socket, sys
with socket.create_connection(("127.0.0.1", {port})) as test:
    test.sendall(" ".join(sys.argv[1:]).encode())
    test.shutdown(socket.SHUT_WR)
    sys.exit(int(test.recv(10)))
"""


@contextmanager
def replicas_behind_caddy(
    folder: Path, model: Path, count: int
) -> Iterator[tuple[list[Replica], str]]:
    with ExitStack() as ending:
        replicas = []
        for _ in range(count):
            replicas.append(Replica(folder, model).start())
            ending.callback(replicas[-1].end)
        upstreams = " ".join(replica.address for replica in replicas)
        yield replicas, ending.enter_context(run_caddy(folder, upstreams))


def send_during(url: str, work: Callable[[], None], least: int) -> Tally:
    """Send requests one after another until `work` is done, and at least `least`."""
    tally, done = Tally(), threading.Event()
    path, body = EMBED

    def send() -> None:
        headers = {"Host": NAME}
        with httpx2.Client(base_url=url, headers=headers, verify=False, timeout=90) as client:
            while not done.wait(PAUSE) or tally.sent < least:
                tally.sent += 1
                try:
                    answer = client.post(path, json=body)
                except httpx2.TransportError:
                    continue
                tally.statuses[answer.status_code] += 1

    with httpx2.Client(base_url=url, headers={"Host": NAME}, verify=False) as client:
        wait_until(lambda: _is_served(client), "Caddy never had its certificate")
    sender = threading.Thread(target=send)
    sender.start()
    try:
        wait_until(lambda: tally.sent > 10, "no request was sent")
        work()
    finally:
        done.set()
        sender.join(LIMIT)
    return tally


def _is_served(client: httpx2.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx2.TransportError:
        return False


@contextmanager
def docker_that_replaces(folder: Path, replicas: dict[str, Replica]) -> Iterator[list[str]]:
    """A program `docker`, first in PATH, whose `up` replaces a replica; yields the commands."""
    commands: list[str] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                with connection.makefile() as sent:
                    command = sent.read()
                commands.append(command)
                if " up " in command:
                    replicas[command.split()[-1]].replace()
                connection.sendall(b"0")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = folder / "docker"
        python = shutil.which("python3")
        program.write_text(DOCKER.format(python=python, port=listener.getsockname()[1]))
        program.chmod(0o755)
        serving = threading.Thread(target=serve, args=(listener,))
        serving.start()
        try:
            yield commands
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join(LIMIT)


def test_no_request_is_lost_while_two_replicas_are_updated(tmp_path: Path, tiny_m3: Path) -> None:
    with replicas_behind_caddy(tmp_path, tiny_m3, 2) as (replicas, url):
        before = [replica.pid for replica in replicas]
        named = dict(zip(("embedder", "embedder-2"), replicas, strict=True))
        with docker_that_replaces(tmp_path, named) as commands:
            environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
            command = [REPOSITORY / "deploy" / "update.sh", "-f", "docker-compose.cpu.yml"]

            def update() -> None:
                subprocess.run(command, env=environment, check=True)

            tally = send_during(url, update, 1000)
        after = [replica.pid for replica in replicas]
        assert not set(before) & set(after)
    assert [line.split()[-1] for line in commands] == ["embedder", "embedder", "embedder-2"]
    assert all(" --wait " in line for line in commands[1:])
    assert (tally.answered, tally.refused, tally.lost) == (tally.sent, 0, 0), tally


def test_requests_wait_while_the_only_replica_is_replaced(tmp_path: Path, tiny_m3: Path) -> None:
    with replicas_behind_caddy(tmp_path, tiny_m3, 1) as ((replica,), url):
        tally = send_during(url, replica.replace, 300)
    assert (tally.answered, tally.refused, tally.lost) == (tally.sent, 0, 0), tally
