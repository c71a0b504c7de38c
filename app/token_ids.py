"""Decodes the token ids of OpenAI's models, which some clients send instead of texts.

The table is the file that tiktoken downloads: a token in base64 and its id in each line.
"""

import asyncio
import hashlib
import sysconfig
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.errors import BodyTooLargeError
from app.logs import escape_text
from app.schemas import invalid_body
from app.settings import TokenIds
from smart_embedder.errors import StartupError

_URL = "https://openaipublic.blob.core.windows.net/encodings/{}_base.tiktoken"
# Packages that carry the files, under the names that tiktoken gives them.
_CARRIERS = ("litellm/litellm_core_utils/tokenizers", "llama_index/core/_static/tiktoken_cache")
# Decoded in a few milliseconds, after which the event loop runs other work.
_IDS_PER_STEP = 65_536
_MAX_QUOTED = 60


@dataclass(frozen=True, slots=True)
class Encoding:
    """The SHA-256 of a table's file, and the tokens that the file lacks."""

    sha256: str
    special: Mapping[str, int]


ENCODINGS: dict[TokenIds, Encoding] = {
    "cl100k": Encoding(
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k": Encoding(
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    ),
}


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Decodes ids to at most `max_bytes` a request."""

    name: TokenIds
    max_bytes: int
    tokens: Mapping[int, bytes] = field(repr=False)

    @classmethod
    def load(cls, name: TokenIds, folder: Path | None, max_bytes: int) -> "TokenTable":
        """Read the table from `folder`, which is TIKTOKEN_CACHE_DIR, or from an installed package.

        Raises `StartupError` if there is no such file, or another one of its name.
        """
        url, encoding = _URL.format(name), ENCODINGS[name]
        file_name = hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
        packages = Path(sysconfig.get_path("purelib"))
        folders = [*([folder] if folder else []), *(packages / carrier for carrier in _CARRIERS)]
        try:
            file = next(filter(Path.is_file, (folder / file_name for folder in folders)), None)
            content = None if file is None else file.read_bytes()
        except OSError as error:
            raise StartupError(f"TOKEN_IDS={name}: the table cannot be read: {error}") from error
        if content is None:
            raise StartupError(
                f"TOKEN_IDS={name} needs the table {url}: save it as {file_name} in the folder "
                "TIKTOKEN_CACHE_DIR"
            )
        if hashlib.sha256(content).hexdigest() != encoding.sha256:
            raise StartupError(f"TOKEN_IDS={name}: {file} is not the table {url}")
        tokens = {token_id: text.encode() for text, token_id in encoding.special.items()}
        for line in content.splitlines():
            token, token_id = line.split()
            tokens[int(token_id)] = a2b_base64(token)
        return cls(name, max_bytes, tokens)

    async def decode_input(self, body: Any, reserve: Callable[[int], None]) -> int:
        """Replace the ids in the field `input` of a parsed body by texts; return their number.

        `reserve` is called with the bytes of each part. Raises `InvalidRequestError` for values
        that are no ids of this table, and `BodyTooLargeError` for more bytes than `max_bytes`.
        """
        value = body.get("input") if isinstance(body, dict) else None
        if not isinstance(value, list) or not value:
            return 0
        several = isinstance(value[0], list)
        if not several and type(value[0]) is not int:
            return 0
        texts, size = [], 0
        for ids in value if several else [value]:
            if not isinstance(ids, list):
                raise invalid_body("the field input mixes token ids and texts", "/input")
            parts = []
            for first in range(0, len(ids), _IDS_PER_STEP):
                part = self._decode(ids[first : first + _IDS_PER_STEP])
                size += len(part)
                if size > self.max_bytes:
                    raise BodyTooLargeError(
                        f"the token ids stand for more than {self.max_bytes} bytes "
                        "(MAX_BODY_BYTES): send fewer texts"
                    )
                reserve(len(part))
                parts.append(part)
                await asyncio.sleep(0)
            texts.append(b"".join(parts).decode("utf-8", "replace"))
        count = sum(map(len, value)) if several else len(value)
        body["input"] = texts
        return count

    def _decode(self, ids: list[Any]) -> bytes:
        if set(map(type, ids)) != {int}:  # True would be read as 1.
            raise invalid_body("the field input mixes token ids and other values", "/input")
        try:
            return b"".join(map(self.tokens.__getitem__, ids))
        except KeyError as error:
            unknown = escape_text(str(error.args[0]), _MAX_QUOTED)
            raise invalid_body(
                f"the field input holds the token id {unknown}, which {self.name} does not have "
                "(TOKEN_IDS)",
                "/input",
            ) from None
