"""The files of the page at /ui: their headers, caching and access."""

import gzip
import re
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.support.server import REPOSITORY

FOLDER = REPOSITORY / "app" / "ui"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*"))
MAX_BYTES = 83_000


def test_files_have_their_type_and_security_headers_and_are_small(client):
    types = {".html": "html", ".css": "css", ".js": "javascript", ".svg": "svg"}
    total = 0
    for name in FILES:
        path, content = f"/ui/{name}", (FOLDER / name).read_bytes()
        with client.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as answer:
            packed = b"".join(answer.iter_raw())
        assert (answer.headers["content-encoding"], gzip.decompress(packed)) == ("gzip", content)
        total += len(packed)
        # Clients without gzip get the files uncompressed.
        answer = client.get(path, headers={"Accept-Encoding": "gzip;q=0, identity"})
        assert (answer.status_code, answer.content) == (200, content)
        assert "content-encoding" not in answer.headers
        assert answer.headers["vary"] == "Accept-Encoding"
        assert types[Path(name).suffix] in answer.headers["content-type"]
        policy = answer.headers["content-security-policy"].split("; ")
        assert "default-src 'none'" in policy
        assert {"frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= set(policy)
        assert all(part.endswith(("'none'", "-src 'self'")) for part in policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert total < MAX_BYTES


@pytest.mark.parametrize("path", ["/ui", "/ui/"])
def test_the_page_is_at_ui_and_its_links_are_relative(client, path: str) -> None:
    page = client.get(path).text
    assert page.replace('="../', '="') == (FOLDER / "index.html").read_text()
    addresses = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert "main.js" in " ".join(addresses)
    for address in addresses:
        assert not address.startswith("/")
        assert client.get(urljoin(path, address)).status_code == 200, address
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")


def test_a_file_with_the_same_etag_is_304(client) -> None:
    first = client.get("/ui/main.js")
    again = client.get("/ui/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == "no-cache"
    changed = client.get("/ui/main.js", headers={"If-None-Match": '"another"'})
    assert changed.status_code == 200


def test_other_files_are_404_and_post_is_405(client) -> None:
    for path in (
        *("/ui/nowhere.js", "/ui/../main.py", "/ui/%2e%2e/main.py", "/ui/..%2fmain.py"),
        *("/ui/core/../../main.py", "/ui//etc/passwd", "/ui/%2fetc%2fpasswd", "/ui/core"),
        *("/ui/main.js%00", "/uinowhere"),
    ):
        assert client.get(path).status_code == 404, path
    assert client.post("/ui", json={}).status_code == 405
