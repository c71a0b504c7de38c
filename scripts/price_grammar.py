"""Requests by grammar: each is composed of productions, and one of them grows.

The OpenAPI description gives paths, methods, bodies, formats and parameters. HTTP, JSON, Unicode,
the content encodings and Arrow give what a client may write beyond it. `draw` gives shapes, each a
function from a size to a request of about so many bytes; the same seed gives the same shapes.
"""

import gzip
import itertools
import json
import random
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
from backports import zstd

KIB = 1024
# The server reads 64 KiB of a head.
LARGEST_HEAD = 65_000
_ENVELOPE = 600
_HOLE = "\ue000"
_HOLE_TEXT, _HOLE_JSON = _HOLE.encode(), f'"{_HOLE}"'.encode()
_HOLE_MEMBER = f'"{_HOLE}": 0'.encode()
# As many texts as one request may have, about.
_FEW, _MANY = 20, 1000

Json = Any
Write = Callable[[int], bytes]
Headers = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Fill:
    """A production that writes at most so many bytes; `name` tells what they are."""

    name: str
    write: Write


@dataclass(frozen=True, slots=True)
class Asked:
    """A body, or a whole request, as it is sent; `size` is that of the body, unpacked."""

    content: bytes
    size: int


Make = Callable[[int], Asked]


@dataclass(frozen=True, slots=True)
class Shape:
    """A request that grows up to `limit` bytes."""

    family: str
    name: str
    limit: int
    make: Make


@dataclass(frozen=True, slots=True)
class Target:
    """A method and a path, and what the description says of them.

    `path` may hold names in braces. `kinds` are the types of its body with their schemas, `formats`
    those of its answer, `query` the names of its parameters.
    """

    method: str
    path: str
    kinds: dict[str, Json] = field(default_factory=dict)
    formats: tuple[str, ...] = ()
    query: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.method} {self.path}"


def targets(description: Json) -> Iterator[Target]:
    """Every operation of an OpenAPI description."""
    for path, operations in description["paths"].items():
        for method, about in operations.items():
            content = about.get("requestBody", {}).get("content", {})
            kinds = {kind: each["schema"] for kind, each in content.items()}
            formats = tuple(about["responses"].get("200", {}).get("content", ()))
            query = [e["name"] for e in about.get("parameters", ()) if e["in"] == "query"]
            yield Target(method.upper(), path, kinds, formats, tuple(query))


# ---- units, which are repeated


def characters(rng: random.Random) -> list[str]:
    """Those that normalisation makes longest, one of each category of Unicode, and some words."""
    every = [chr(code) for code in range(0x20, 0x30000)]
    kinds: dict[str, list[str]] = {}
    for each in every:
        kinds.setdefault(unicodedata.category(each), []).append(each)
    for kind in ("Cs", "Cn", "Co"):  # Surrogates, and what is not assigned.
        kinds.pop(kind, None)

    def growth(each: str) -> float:
        return len(unicodedata.normalize("NFKC", each)) / len(each.encode())

    longest = sorted(itertools.chain(*kinds.values()), key=growth, reverse=True)[:3]
    drawn = [rng.choice(kind) for kind in kinds.values()]
    return [*longest, "a ", "a", *drawn, *(rng.choice(drawn) + rng.choice(drawn) for _ in range(8))]


def between(
    opening: str | bytes, unit: str | bytes, closing: str | bytes = "", *, name: str = ""
) -> Fill:
    """The unit, again and again, once at least, between a beginning and an end."""
    first, raw, last = (
        each.encode() if isinstance(each, str) else each for each in (opening, unit, closing)
    )

    def write(size: int) -> bytes:
        count = (size - len(first) - len(last)) // len(raw)
        return first + raw * max(1, count) + last

    return Fill(name or f"{_short(first)} {_short(raw)}... {_short(last)}", write)


def _short(unit: str | bytes) -> str:
    text = ascii(unit if isinstance(unit, str) else unit.decode("latin-1"))
    return text if len(text) <= 30 else f"{text[:20]}..{text[-8:]}"


def numbered(form: str, joint: str) -> Fill:
    """Parts that are all different: `form` takes their number."""

    def write(size: int) -> bytes:
        count = max(1, size // len((form % 0 + joint).encode()))
        return joint.join(form % number for number in range(count)).encode()

    return Fill(f"{_short(form % 0)}, {_short(form % 1)}, ...", write)


# ---- JSON

_ATOMS = ("null", "0", "-1.5e300", "true", '""', '"x"', "[]", "{}", "[[]]", '{"a":0}', '"\\u0000"')
_TOKENS = ("{", "}", "[", "]", ",", ":", '"', "\\", "0", "-", "e", "null", "{}", "[]", " ", "\t")
# Values of any type, whatever a schema says.
_WILD = (
    *(("", "9", ""), ("0.", "0", "1"), ("1e", "9", ""), ("-", "1", ""), ("", " ", "0")),
    *(("{", '"a":0,', "}"), ("{", ",", "}"), ("{", '"":', "}")),
    *(("[", f"{atom},", f"{atom}]") for atom in _ATOMS),
)


def text(unit: str, *, escaped: bool) -> Fill:
    """The inside of a string of the unit, as UTF-8 or in escapes."""
    raw = json.dumps(unit, ensure_ascii=False)[1:-1].encode()
    if escaped:
        codes = struct.iter_unpack("<H", unit.encode("utf-16-le"))
        raw = b"".join(b"\\u%04x" % code for (code,) in codes)
    return between("", raw, name=f"string of {_short(raw)}")


def array(item: str) -> Fill:
    """A list of one item, again and again."""
    return between("[", f"{item},", f"{item}]", name=f"list of {_short(item)}")


def nested(opening: str, inner: str, closing: str) -> Fill:
    """Brackets within brackets."""

    def write(size: int) -> bytes:
        depth = max(1, (size - len(inner)) // len(opening + closing))
        return (opening * depth + inner + closing * depth).encode()

    return Fill(f"nested {opening}", write)


def members(stem: str, value: str, *, distinct: bool) -> Fill:
    """Members of an object, with names that begin with `stem` or are all the same."""
    if distinct:
        return numbered(f'"{stem.replace("%", "%%")}%05x":{value}', ",")
    member = f'"{stem}00000":{value}'
    return between("", f"{member},", member, name=f"the same {_short(member)}")


def wild_values(rng: random.Random) -> list[Fill]:
    """Values of any type, whatever the schema says."""
    objects = (members("f", rng.choice(_ATOMS), distinct=each) for each in (True, False))
    return [
        *(between(*each) for each in _WILD),
        *(nested(*each) for each in (("[", "", "]"), ('{"a":', "0", "}"), ("[[],", "0", "]"))),
        between('"', rng.choice(_TOKENS), '"'),
        *(Fill(f"object of {e.name}", spliced({_HOLE: 0}, e, _HOLE_MEMBER)) for e in objects),
    ]


def examples(schema: Json) -> list[Json]:
    """A valid value for each branch of a schema."""
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return [value for branch in schema[key] for value in examples(branch)]
    if "enum" in schema or "const" in schema:
        return [schema.get("const", schema.get("enum", [""])[0])]
    kind = schema.get("type")
    if kind == "array":
        return [[value] for value in examples(schema.get("items", {}))]
    if kind == "object":
        fields, required = schema.get("properties", {}), schema.get("required", ())
        drawn = itertools.product(*(examples(fields[name]) for name in required))
        return [dict(zip(required, values, strict=True)) for values in drawn]
    number = max(1, schema.get("minimum", 1))
    simple = {"integer": number, "number": number, "boolean": True, "null": None}
    return [simple.get(kind, "a word")]


def spliced(value: Json, fill: Fill, hole: bytes = _HOLE_JSON) -> Write:
    """JSON of a value whose holes are filled, each with its share."""
    parts = json.dumps(value, ensure_ascii=False).encode().split(hole)

    def write(size: int) -> bytes:
        left = size - sum(map(len, parts)) - len(parts)
        return fill.write(max(1, left // max(1, len(parts) - 1))).join(parts)

    return write


def with_texts(value: Json, count: int, numbers: Iterator[int] | None = None) -> Json:
    """The value with a hole in every text, no two the same, and so many of what a list holds."""
    numbers = itertools.count() if numbers is None else numbers
    match value:
        case str():
            return f"{next(numbers)} {_HOLE}"
        case list():
            return [with_texts(value[0], 1, numbers) for _ in range(count)]
        case dict():
            return {name: with_texts(each, count, numbers) for name, each in value.items()}
    return value


def with_lists(value: Json) -> tuple[Json, Json]:
    """The value with a hole for every list, and what an item was."""
    match value:
        case list():
            return _HOLE, value[0]
        case dict():
            found = {name: with_lists(each) for name, each in value.items()}
            items = [item for _, item in found.values() if item is not None]
            return {name: each for name, (each, _) in found.items()}, items[0] if items else None
    return value, None


def admits(schema: Json, kind: str) -> bool:
    """Whether a schema takes values of a type."""
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return schema.get("type") == kind or any(admits(each, kind) for each in branches)


def valid_values(schema: Json, rng: random.Random, units: Sequence[str]) -> Iterator[Fill]:
    """Bodies that a schema describes, growing in their texts or in the number of them."""
    texts = [units[0], "a ", *rng.sample(units, 2)]
    for body in examples(schema):
        shown = _short(json.dumps(body))
        for unit, count in itertools.product(texts, (1, _FEW, _MANY)):
            fill, holed = text(unit, escaped=rng.random() < 0.5), with_texts(body, count)
            is_usual = count < _MANY or unit in texts[:2]
            if is_usual and _HOLE in json.dumps(holed, ensure_ascii=False):
                write = spliced(holed, fill, _HOLE_TEXT)
                yield Fill(f"{count} x {fill.name} in {shown}", write)
        holed, item = with_lists(body)
        if item is not None:
            fill = array(json.dumps(item))
            yield Fill(f"{fill.name} in {shown}", spliced(holed, fill))


def other_values(schema: Json, rng: random.Random, units: Sequence[str]) -> Iterator[Fill]:
    """Bodies with a field, or a name, that grows, whether or not the schema has it so."""
    fields, body = schema.get("properties", {}), examples(schema)[0]

    def with_field(name: str, fill: Fill, hole: bytes = _HOLE_JSON) -> Fill:
        return Fill(f"{name} = {fill.name}", spliced(body | {name: _HOLE}, fill, hole))

    def some_text() -> Fill:
        return text(rng.choice(units), escaped=rng.random() < 0.5)

    for name, about in fields.items():
        yield with_field(name, rng.choice(wild_values(rng)))
        if admits(about, "string") or not about.keys() & {"type", "anyOf"}:
            yield with_field(name, some_text(), _HOLE_TEXT)
        if admits(about, "array"):
            yield with_field(name, array('"x"'))
            yield with_field(name, array(rng.choice(_ATOMS)))
    for fill in rng.sample(wild_values(rng), 6):
        yield with_field("unknown", fill)
    yield with_field("unknown", some_text(), _HOLE_TEXT)
    known = [*fields, "text"]
    # One with a letter changed.
    name = rng.choice(known)
    at = rng.randrange(len(name))
    misspelt = name[:at] + rng.choice("abcdefghijklmnopqrstuvwxyz_") + name[at + 1 :]
    stems = [misspelt, "\u0130" + rng.choice(units).strip(), ""]
    # A beginning of several names is near to each of them.
    stems += [each[: len(each) * 2 // 3] for each in rng.sample(known, min(3, len(known)))]
    escaped = [json.dumps(each)[1:-1] for each in stems]
    for stem, distinct, base in itertools.product(escaped, (True, False), (body, {})):
        fill = members(stem, rng.choice(_ATOMS), distinct=distinct)
        beside = "beside what is required" if base else "and nothing that is required"
        yield Fill(f"{fill.name}, {beside}", spliced(base | {_HOLE: 0}, fill, _HOLE_MEMBER))
    yield from rng.sample(wild_values(rng), 4)


def json_values(schema: Json, rng: random.Random, units: Sequence[str]) -> Iterator[Fill]:
    """Bodies that a schema describes, and others, each growing in one place."""
    yield from valid_values(schema, rng, units)
    yield from other_values(schema, rng, units)


def junk(valid: bytes, separator: str) -> Iterator[Fill]:
    """Tokens again and again, alone, before and behind something valid."""
    for token, end in itertools.product((*_TOKENS, "\x00", "\u00e9"), {"", separator}):
        yield between("", token + end)
    for token in (" ", "\n", "\ufeff", "0,"):
        yield between("", token, valid)
        yield between(valid, token)


# ---- lines of a stream


def lines(schema: Json, rng: random.Random, units: Sequence[str]) -> Iterator[Fill]:
    """Lines of JSON: one that grows, or so many bytes of them again and again; and no lines."""
    for fill in json_values(schema, rng, units):
        yield Fill(f"a line: {fill.name}", fill.write)
        line = fill.write(rng.choice((200, 3000, 60_000))) + b"\n"
        yield between("", line, name=f"lines of {len(line)} bytes: {fill.name}")
    yield from junk(b'"a"\n', "\n")


# ---- Arrow


def _arrow(batches: Sequence[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def _batch(columns: dict[str, Json], metadata: dict[str, str] | None = None) -> pa.RecordBatch:
    arrays = [each if isinstance(each, pa.Array) else pa.array(each) for each in columns.values()]
    fields = [pa.field(name, a.type) for name, a in zip(columns, arrays, strict=True)]
    return pa.record_batch(arrays, schema=pa.schema(fields, metadata=metadata))


def arrow_messages(rng: random.Random, units: Sequence[str]) -> Iterator[Fill]:
    """Streams of Arrow that grow in rows, texts, messages, columns, names or metadata."""
    one = {"text": ["a"], "id": [1]}
    none = {"text": pa.array([], pa.string())}
    unit = rng.choice(units)
    makes: dict[str, Write] = {
        "one text": lambda n: _arrow([_batch({"text": [unit * (n // len(unit.encode()))]})]),
        "rows of a word": lambda n: _arrow([_batch({"text": ["a "] * (n // 6)})]),
        "rows of nothing": lambda n: _arrow([_batch({"text": [""] * (n // 4)})]),
        "rows of null": lambda n: _arrow(
            [_batch({"text": pa.array([None] * (n // 4), pa.string())})]
        ),
        "long ids": lambda n: _arrow([_batch({"text": ["a"], "id": ["x" * n]})]),
        "batches of a row": lambda n: _repeated_batches(one, n),
        "batches of no row": lambda n: _repeated_batches(none, n),
        "columns": lambda n: _arrow([_batch({f"c{i:04x}": ["a"] for i in range(n // 200 + 1)})]),
        "a long name": lambda n: _arrow([_batch(one | {"n" * n: ["a"]})]),
        "metadata": lambda n: _arrow([_batch(one, {f"k{i:04x}": "" for i in range(n // 40 + 1)})]),
        "nested lists": lambda n: _arrow([_batch({"text": [[["a"] * (n // 6)]]})]),
        "a dictionary": lambda n: _arrow(
            [_batch({"text": pa.array(["a", "b"] * (n // 8)).dictionary_encode()})]
        ),
        "schemas": lambda n: between("", _arrow([_batch(none)])[:-8]).write(n),
        "frames": between("", struct.pack("<Ii", 0xFFFFFFFF, 8) + bytes(8)).write,
    }
    yield from (Fill(name, make) for name, make in makes.items())
    for _ in range(8):
        name, make = rng.choice(list(makes.items()))
        yield Fill(f"{name}, damaged", partial(_damaged, make, rng.randrange(1 << 30)))


def _repeated_batches(columns: dict[str, Json], size: int) -> bytes:
    whole, end = _arrow([_batch(columns)]), _arrow([_batch(columns), _batch(columns)])
    message = end[len(whole) - 8 : -8]
    return whole[:-8] + message * (size // len(message)) + whole[-8:]


def _damaged(make: Write, seed: int, size: int) -> bytes:
    """Some bytes of the first messages are others."""
    rng, content = random.Random(seed), bytearray(make(size))
    for _ in range(3):
        content[rng.randrange(8, min(len(content), 600))] = rng.choice((0, 1, 127, 255))
    return bytes(content)


# ---- encodings of a body: from a write of the content to a body


def packed(write: Write, pack: Callable[[bytes], bytes] = bytes) -> Make:
    """A body that is written and then packed."""

    def make(size: int) -> Asked:
        content = write(size)
        return Asked(pack(content), len(content))

    return make


def encodings(write: Write) -> Iterator[tuple[str, str, Make]]:
    """Content-Encoding and body, growing in the content or in what a format has around it."""

    def repeated(member: bytes, unpacked: int, size: int) -> Asked:
        count = max(1, size // max(1, len(member)))
        return Asked(member * count, unpacked * count)

    def as_it_is(fill: Fill, unpacked: int, size: int) -> Asked:
        return Asked(fill.write(size), unpacked)

    gzipped = partial(gzip.compress, compresslevel=6, mtime=0)
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzipped,
        "deflate": zlib.compress,
        "zstd": zstd.compress,
        "br": bytes,  # Nothing packs it here.
    }
    for name, pack in packers.items():
        yield f"whole in {name}", name, packed(write, pack)
        for inner in (b"", b" ", b"[" * 64):
            what = f"members of {name} with {_short(inner)}"
            yield what, name, partial(repeated, pack(inner), len(inner))
    twice = packed(write, lambda content: gzipped(gzipped(content)))
    yield "gzip within gzip", "gzip, gzip", twice
    head, end, valid = gzipped(b"")[:10], b"\1\0\0\xff\xff" + bytes(8), gzipped(write(100))
    with_name = valid[:3] + b"\x08" + valid[4:10]
    for fill, unpacked in (
        (between(head, b"\0\0\0\xff\xff", end, name="blocks of gzip with nothing"), 0),
        (between(with_name, b"n", b"\0" + valid[10:], name="a long name in gzip"), 100),
        (between(valid, b"\0", name="gzip and then junk"), 100),
    ):
        yield fill.name, "gzip", partial(as_it_is, fill, unpacked)


# ---- heads, queries and paths

_HEADERS = {
    **dict.fromkeys(("Accept", "Content-Type"), "application/json"),
    **dict.fromkeys(("Accept-Encoding", "TE"), "gzip"),
    **dict.fromkeys(("Connection", "Cache-Control"), "close"),
    **dict.fromkeys(("Cookie", "tracestate", "baggage", "Priority"), "a=b"),
    **dict.fromkeys(("Host", "Accept-Language", "Accept-Charset", "Content-Encoding"), "identity"),
    **dict.fromkeys(("Expect", "If-Vector-Space", "X-Request-ID", "X-Unknown"), "x"),
    **dict.fromkeys(("Authorization", "Upgrade"), "Bearer x"),
    **dict.fromkeys(("Origin", "If-None-Match"), "http://localhost"),
    **dict.fromkeys(("Forwarded", "X-Forwarded-For"), "1.2.3.4"),
    **dict.fromkeys(("Range", "traceparent"), "00-1-1-01"),
}
_UNITS_OF_HEADERS = (";", ",", "a ", "a;", "a=1,", "\\", "(", '"', "\xe9")


def header_values(valid: str) -> Iterator[Fill]:
    """Whatever lists, parameters, quoted strings and inner lists allow, with and without an end."""
    beginnings = ("", valid, f'{valid}; a="', f"{valid}, a=(", "(", '"')
    for beginning, unit in itertools.product(beginnings, _UNITS_OF_HEADERS):
        yield between(beginning, unit, {"(": ")", '"': '"'}.get(beginning[-1:], ""))


_UNITS_OF_QUERIES = ("a&", "a=1&", "&", "=", "%41", "%", "+", ";", "a[]=1&", "/", "\xe9", "?", "#")
_UNITS_OF_PATHS = ("/", "a", "a/", "../", "%2e", "%2f", "%", ";", ":", "//", "\xe9", "embed/")


# ---- whole requests


def asked(
    target: Target,
    body: Asked = Asked(b"", 0),
    headers: Sequence[tuple[str, bytes]] = (),
    *,
    query: bytes = b"",
    path: bytes | None = None,
    chunked: Callable[[bytes], bytes] | None = None,
    version: str = "1.1",
) -> Asked:
    """A request as it is sent."""
    sent = {"Host": b"localhost", "Connection": b"close"} | dict(headers)
    content = body.content
    if chunked is not None:
        content = chunked(content)
        sent["Transfer-Encoding"] = b"chunked"
    elif target.method == "POST" or content:
        sent["Content-Length"] = b"%d" % len(content)
    where = (target.path.encode() if path is None else path) + (b"?" + query if query else b"")
    head = b"%b %b HTTP/%b\r\n" % (target.method.encode(), where, version.encode())
    head += b"".join(b"%b: %b\r\n" % (name.encode(), value) for name, value in sent.items())
    return Asked(head + b"\r\n" + content, body.size)


def with_body(target: Target, body: Make, headers: Headers, **how: Any) -> Make:
    """A request that grows by its body; `how` is as for `asked`."""
    return lambda size: asked(target, body(size - _ENVELOPE), headers, **how)


def in_chunks(size: int, content: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """HTTP/1.1's chunks, all of one size."""
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    chunks = [b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces]
    return b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


class Grammar:
    """The shapes of one description and seed; `models` are names for {model} in a path."""

    def __init__(
        self, description: Json, seed: int, models: Sequence[str], largest_body: int
    ) -> None:
        self._largest_body = largest_body
        self._rng = random.Random(seed)
        self._units = characters(self._rng)
        drawn = [*models, "unknown"]
        self._targets = [
            replace(each, path=each.path.replace("{model}", self._rng.choice(drawn)))
            for each in targets(description)
        ]
        others = ("/docs", "/redoc", "/openapi.json", "/ui/", "/metrics", "/nothing", "/v1/nothing")
        self._targets += [Target("GET", path) for path in others]
        self._posts = [each for each in self._targets if each.kinds]

    def shapes(self) -> list[Shape]:
        """All of them, in an order in which a part of them has something of everything."""
        families = (self._bodies, self._encoded, self._framed, self._heads, self._urls)
        drawn = [list(family()) for family in families]
        for each in drawn:
            self._rng.shuffle(each)
        # Bodies take most of the time: the others are over at half of it.
        places = [
            ((index + 0.5) / len(each) * (1 + (shape.family == "body")), shape)
            for each in drawn
            for index, shape in enumerate(each)
        ]
        return [shape for _, shape in sorted(places, key=lambda place: place[0])]

    def _bodies(self) -> Iterator[Shape]:
        for target in self._posts:
            for kind, schema in target.kinds.items():
                if kind == "application/json":
                    valid = json.dumps(examples(schema)[0]).encode()
                    drawn = [*json_values(schema, self._rng, self._units)]
                    drawn += self._rng.sample(list(junk(valid, "")), 8)
                elif "ndjson" in kind:
                    drawn = [*lines(schema, self._rng, self._units)]
                else:
                    drawn = [*arrow_messages(self._rng, self._units)]
                family = "body" if kind == "application/json" else "stream"
                for fill in drawn:
                    yield self._with_body(family, target, kind, fill)

    def _with_body(self, family: str, target: Target, kind: str, fill: Fill) -> Shape:
        headers = [("Content-Type", kind.encode())]
        if len(target.formats) > 1 and self._rng.random() < 0.5:
            headers.append(("Accept", self._rng.choice(target.formats).encode()))
        elif self._rng.random() < 0.2:
            headers.append(("Accept-Encoding", self._rng.choice((b"gzip", b"zstd"))))
        version = "1.0" if self._rng.random() < 0.1 else "1.1"
        query = b""
        if target.query and self._rng.random() < 0.5:
            query = self._rng.choice(target.query).encode() + b"=true"
        make = with_body(target, packed(fill.write), headers, version=version, query=query)
        about = " ".join(each.decode() for _, each in headers[1:])
        what = f"{target.name} {about} HTTP/{version}: {fill.name}"
        return Shape(family, what, self._largest_body, make)

    def _small(self, target: Target) -> tuple[Headers, Write]:
        """The type of a body that grows by its texts, as a header, and what writes it."""
        kind, schema = next(iter(target.kinds.items()))
        if "arrow" in kind:
            kind = next((each for each in target.kinds if "ndjson" in each), kind)
            schema = target.kinds[kind]
        body = with_texts(examples(schema)[-1], 3)
        write = spliced(body, text("a ", escaped=False), _HOLE_TEXT)
        return [("Content-Type", kind.encode())], write

    def _some_posts(self, count: int) -> list[Target]:
        """Some with bodies, those of streams among them."""
        streams = [each for each in self._posts if len(each.kinds) > 1]
        others = [each for each in self._posts if each not in streams]
        return streams + self._rng.sample(others, count)

    def _encoded(self) -> Iterator[Shape]:
        for target in self._some_posts(3):
            headers, write = self._small(target)
            for name, encoding, make_body in encodings(write):
                sent = [*headers, ("Content-Encoding", encoding.encode())]
                make = with_body(target, make_body, sent)
                yield Shape("encoding", f"{target.name}: {name}", self._largest_body, make)

    def _framed(self) -> Iterator[Shape]:
        frames = {f"chunks of {size}": partial(in_chunks, size) for size in (1, 7, 200, 9000)}
        for unit in (b";", b"0", b"a", b'"'):
            extension = b";" + unit * 40
            name = f"chunks of 1, each with 40 x {_short(unit)}"
            frames[name] = partial(in_chunks, 1, extension=extension)
        for target in self._some_posts(3):
            headers, write = self._small(target)
            for name, frame in frames.items():
                make = with_body(target, packed(write), headers, chunked=frame)
                yield Shape("framing", f"{target.name}: {name}", self._largest_body // 8, make)
            for unit in (b"a: b\r\n", b"a", b"\r\n"):
                make = partial(self._with_trailer, target, between("", unit, b"\r\n"))
                what = f"{target.name}: trailers {_short(unit)}"
                yield Shape("framing", what, LARGEST_HEAD, make)

    def _with_trailer(self, target: Target, trailer: Fill, size: int) -> Asked:
        headers, write = self._small(target)
        frame = partial(in_chunks, 64, trailer=trailer.write(size))
        return asked(target, packed(write)(_ENVELOPE), headers, chunked=frame)

    def _heads(self) -> Iterator[Shape]:
        pages = [each for each in self._targets if each.method == "GET"]
        pages = [*(each for each in pages if each.path == "/"), self._rng.choice(pages)]
        for target in self._some_posts(1) + pages:
            for name, valid in _HEADERS.items():
                for fill in header_values(valid):
                    yield self._growing("head", target, f"{name}: {fill.name}", fill, header=name)
            for unit in ("a: b\r\n", "Accept: a\r\n", "a:\r\n"):
                fill = between("b\r\n", unit, "c: d")
                yield self._growing("head", target, f"headers {_short(unit)}", fill, header="X")

    def _growing(
        self, family: str, target: Target, what: str, fill: Fill, *, header: str = "", at: str = ""
    ) -> Shape:
        """A request with a small body that grows in a header, or at its `path` or `query`."""
        body, headers = Asked(b"", 0), Headers()
        if target.kinds:
            headers, write = self._small(target)
            body = packed(write)(200)

        def make(size: int) -> Asked:
            written = fill.write(size - _ENVELOPE)
            own = [(header, written)] if header else []
            where: dict[str, Any] = {at: written} if at else {}
            return asked(target, body, [*headers, *own], **where)

        return Shape(family, f"{target.name} {what}", LARGEST_HEAD, make)

    def _urls(self) -> Iterator[Shape]:
        for target in self._targets:
            named = [between("", f"{name}=1&") for name in target.query]
            fills = [between("", unit) for unit in _UNITS_OF_QUERIES]
            fills += [numbered(f"{stem}%04x", "&") for stem in ("", "return_")]
            fills.append(between("a=", "1"))
            if not target.query:
                fills = self._rng.sample(fills, 5)
            for fill in fills + named:
                yield self._growing("url", target, f"?{fill.name}", fill, at="query")
            for unit in self._rng.sample(_UNITS_OF_PATHS, 4):
                fill = between(target.path.rpartition("/")[0] + "/", unit)
                yield self._growing("url", target, f"path {_short(unit)}...", fill, at="path")


def draw(description: Json, seed: int, models: Sequence[str], largest_body: int) -> list[Shape]:
    """The shapes of a seed; those that grow in their body grow to `largest_body`."""
    return Grammar(description, seed, models, largest_body).shapes()
