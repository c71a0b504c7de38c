"""Rules for vectors: the responses of the native API, OpenAI, Cohere and TEI."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tests.oracle.comparison import Encoded
from tests.oracle.pictures import PICTURES
from tests.oracle.rules import (
    ALL_TOKENS,
    BOTH,
    CUTS,
    ELSEWHERE,
    LONG,
    MIXED,
    PROMPT,
    SHORT,
    SIDES,
    TEI_TOGETHER,
    Body,
    Rule,
    Served,
    first,
    is_below_limit,
    read_options,
    shown,
    texts_of,
    usage,
    warning,
)
from tests.oracle.truth import (
    M3,
    Clip,
    Ids,
    Picture,
    Qwen,
    ReadingOptions,
    RefusedError,
    Vectors,
    muvera,
    pooled,
    quantized,
    unit,
)
from tests.support.formats import JSON, SAFETENSORS
from tests.support.pictures import data_url

_DTYPES = ("float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary")
_TYPES = ("float", "base64", "int8", "uint8", "binary", "ubinary")
# Tasks of queries and documents, and the names of their prompts; the models have some of these.
_QUERIES = ("query", "search_query", "retrieval.query", "code.query", "qa.query")
_DOCUMENTS = ("document", "passage", "search_document", "retrieval.passage", "code.passage")
_TASKS = (*_QUERIES, *_DOCUMENTS, "classification", "clustering", "text-matching", "text")


def _dense(
    served: Served,
    text: str | Picture,
    options: ReadingOptions,
    *,
    normalize: bool,
    width: int | None,
) -> Any:
    found = served.dense_model.vectors(text, options)
    if width is not None:
        return _shortened(served, found, width, normalize=normalize)
    return found.dense if normalize else found.raw


def _shortened(served: Served, found: Vectors, width: int, *, normalize: bool) -> Any:
    full = len(found.raw)
    # Qwen3-Embedding was trained for 32 and more.
    if width > full or (width < full and (served.dense is None or width < 32)):
        raise RefusedError
    return unit(found.raw[:width]) if normalize else found.raw[:width]


# The native API.


def _native_vectors(
    served: Served, body: Body, texts: list[str | Picture], field_name: str
) -> Iterator[Body]:
    """Yield the vectors, the number of tokens and the warnings of each text."""
    kinds = [
        kind
        for kind in ("dense", "sparse", "colbert")
        if body.get(f"return_{kind}", kind == "dense" or kind in served.m3.kinds)
    ]
    if (not kinds and not body.get("muvera")) or body.get("if_vector_space"):
        raise RefusedError
    dtype, factor = _native_options(body, kinds)
    prompt = _native_prompt(served, body, kinds)
    for index, text in enumerate(texts):
        options = read_options(body, prompt)
        item: Body = {}
        read: list[tuple[str, Ids]] = []
        if "dense" in kinds:
            normalize, width = body.get("normalize_dense", False), body.get("dimensions")
            dense = _dense(
                served, text, options, normalize=normalize or width is not None, width=width
            )
            item["dense"], item["dense_scale"] = quantized(dense, dtype)
            read.append((served.dense_model.name, served.dense_model.vectors(text, options).ids))
        others = read_options(body, "" if served.dense else prompt)
        if {*kinds} - {"dense"} or body.get("muvera"):
            found = served.token_model.vectors(text, others)
            if served.dense is not None or "dense" not in kinds:
                read.append((served.m3.name, found.ids))
            if "sparse" in kinds:
                item["sparse"] = found.sparse
            if "colbert" in kinds:
                vectors = pooled(found.colbert, factor)
                item["colbert"], item["colbert_scale"] = quantized(vectors, dtype)
            if body.get("muvera"):
                item["muvera"] = muvera(found.colbert, body["muvera"])
            if body.get("return_tokens"):
                item |= _strings(served.token_model, found, kinds)
        side = options.side
        yield {
            "text": shown(text),
            "vectors": {name: value for name, value in item.items() if value is not None},
            "tokens": sum(len(ids.read) for _, ids in read),
            "warnings": [
                warning(name, field_name, index, ids, side)
                for name, ids in read
                if ids.original > ids.limit
            ],
        }


def _native_options(body: Body, kinds: list[str]) -> tuple[str, int | None]:
    dtype, factor = body.get("output_dtype", "float32"), body.get("colbert_pool_factor")
    if dtype != "float32" and not {"dense", "colbert"} & {*kinds}:
        raise RefusedError
    if factor is not None and "colbert" not in kinds:
        raise RefusedError
    of_queries = "query" in {body.get("input_type"), body.get("muvera")}
    if factor is not None and (of_queries or body.get("return_tokens")):
        raise RefusedError
    if body.get("return_tokens") and kinds == ["dense"]:
        raise RefusedError
    return dtype, factor


def _native_prompt(served: Served, body: Body, kinds: list[str]) -> str:
    given = [body[name] for name in ("prompt", "prompt_name") if body.get(name) is not None]
    if given and served.dense is not None and "dense" not in kinds:
        raise RefusedError
    if body.get("prompt") is not None:
        return str(body["prompt"])
    kind = body.get("input_type")
    return served.prompt(body.get("prompt_name")) or (served.prompt_for(kind) if kind else "")


def _strings(model: M3, found: Vectors, kinds: list[str]) -> Body:
    named = model.tokenizer.id_to_token
    strings: Body = {}
    if "sparse" in kinds:
        strings["sparse_tokens"] = [named(token) for token in sorted(found.sparse)]
    if "colbert" in kinds:
        strings["colbert_tokens"] = [named(token) for token in found.colbert_ids]
    return strings


def _native_names(served: Served) -> Body:
    dense, m3 = served.dense_model.name, served.m3.name
    names = dict.fromkeys(("model_name", "dense_model_name"), dense)
    return names | dict.fromkeys(("sparse_model_name", "colbert_model_name"), m3)


def _check_numbers(body: Body, is_json: bool) -> None:
    in_base64 = body.get("encoding") == "base64"
    if is_json and not in_base64 and body.get("output_dtype") in {"float16", "bfloat16"}:
        raise RefusedError
    if in_base64 and not is_json:
        raise RefusedError


def _embeddings(served: Served, question: Any) -> Body:
    body = question.body
    _check_numbers(body, question.writes == JSON)
    found = list(_native_vectors(served, body, texts_of(body["sentences"]), "sentences"))
    answer = _native_names(served) | {
        "data": [{"text": item["text"], "vectors": item["vectors"]} for item in found],
        "usage": usage(sum(item["tokens"] for item in found)),
        "warnings": [warning for item in found for warning in item["warnings"]],
    }
    dtype = body.get("output_dtype", "float32")
    plain = question.writes == JSON and dtype == "float32" and body.get("encoding") != "base64"
    return answer if plain else answer | {"output_dtype": dtype}


_NATIVE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "return_dense": BOTH,
    "return_sparse": BOTH,
    "return_colbert": BOTH,
    "normalize_dense": BOTH,
    "sparse_as_indices": BOTH,
    "dimensions": (32, 48, 64, 8, 65),
    "truncate": BOTH,
    "truncation_side": SIDES,
    "prompt": (PROMPT,),
    "prompt_name": ("query", "document", "clustering", "unknown"),
    "input_type": ("query", "document"),
    "return_tokens": BOTH,
    "output_dtype": _DTYPES,
    "colbert_pool_factor": (2, 3),
    "muvera": ("query", "document"),
    "encoding": ("float", "base64"),
    "if_vector_space": (ELSEWHERE,),
    "model": (),
}
_NATIVE_TOGETHER: tuple[Body, ...] = (
    *({"output_dtype": dtype, "encoding": "base64"} for dtype in _DTYPES),
    {"return_dense": False, "return_sparse": False, "return_colbert": False},
    {"return_colbert": False, "muvera": "document"},
    {"return_tokens": True, "sparse_as_indices": True},
    {"return_tokens": True, "encoding": "base64"},
    {"dimensions": 32, "normalize_dense": True, "output_dtype": "int8"},
    {"prompt": PROMPT, "truncation_side": "left"},
    {"truncate": False, "truncation_side": "left"},
    {"colbert_pool_factor": 2, "input_type": "query"},
    {"colbert_pool_factor": 2, "muvera": "document", "output_dtype": "uint8"},
    {"colbert_pool_factor": 2, "return_tokens": True},
    {"return_dense": False, "prompt": PROMPT},
    {"return_dense": False, "return_colbert": False, "output_dtype": "int8"},
)

# The APIs of OpenAI and Cohere.


def _task_prompt(served: Served, task: str | None, kind: str | None = None) -> str:
    if task is None and kind is None:
        return ""
    kind = "query" if task in _QUERIES else "document" if task in _DOCUMENTS else kind
    names = {"text-matching": ("text-matching", "STS")}.get(str(task), (str(task),))
    return served.prompt_for(*names, *([kind] if kind else []))


def _as_type(vector: Any, kind: str, *, in_base64: bool = False) -> Any:
    dtype = "float32" if kind in {"float", "base64"} else kind
    values, _ = quantized(vector, dtype)
    if kind == "base64" or in_base64:
        return Encoded(np.asarray(values), dtype)
    return values


def _listed(value: Any) -> list[str]:
    return (
        [] if value is None else list(dict.fromkeys(value)) if isinstance(value, list) else [value]
    )


def _openai_types(body: Body) -> tuple[list[str], bool, bool]:
    """Return the requested types, whether they are in base64, and whether they are named."""
    formats, types = _listed(body.get("encoding_format")), _listed(body.get("embedding_type"))
    named = formats if len(formats) > 1 else types if len(types) > 1 else None
    if named is not None:
        if body.get("return_colbert"):
            raise RefusedError
        return named, False, True
    in_base64 = "base64" in formats + types
    numbers = [kind for kind in (*types, body.get("output_dtype"), *formats) if kind is not None]
    numbers = [kind for kind in numbers if kind != "base64"] or ["float"]
    return numbers[:1], in_base64, False


def _openai(served: Served, question: Any) -> Body:
    body = question.body
    task = first(body, "input_type", "task", "task_type")
    factor, side = body.get("colbert_pool_factor"), body.get("muvera")
    if (task is not None and task not in _TASKS) or is_below_limit(body):
        raise RefusedError
    if factor is not None and (not body.get("return_colbert") or "query" in {side, task}):
        raise RefusedError
    prompt = body.get("prompt") or served.prompt(body.get("prompt_name"))
    options = read_options(body, prompt or _task_prompt(served, task))
    plain = options if served.dense is None else replace(options, prompt="")
    beside = any(body.get(name) for name in ("return_sparse", "return_colbert", "muvera"))
    data, tokens, warnings = [], 0, []
    for index, text in enumerate(texts_of(body["input"])):
        item = {"object": "embedding", "index": index} | _openai_dense(served, body, text, options)
        read = [(served.dense_model.name, served.dense_model.vectors(text, options).ids)]
        if beside:
            found = served.token_model.vectors(text, plain)
            item |= _openai_beside(body, found)
            read += [] if served.dense is None else [(served.m3.name, found.ids)]
        data.append(item)
        tokens += sum(len(ids.read) for _, ids in read)
        warnings += [
            warning(name, "input", index, ids, options.side)
            for name, ids in read
            if ids.original > ids.limit
        ]
    answer: Body = {"object": "list", "data": data, "usage": usage(tokens)}
    answer["model"] = served.dense_model.name
    return answer | ({"warnings": warnings} if warnings else {})


def _openai_dense(served: Served, body: Body, text: str | Picture, options: ReadingOptions) -> Body:
    normalize = first(body, "normalize", "normalized", "use_activation") is not False
    width = first(body, "dimensions", "output_dimension", "dimensionality")
    dense = _dense(served, text, options, normalize=normalize, width=width)
    kinds, in_base64, by_name = _openai_types(body)
    item: Body = {"embedding": _as_type(dense, kinds[0], in_base64=in_base64)}
    if by_name:
        item["embedding"] = {kind: _as_type(dense, kind) for kind in kinds}
    if {"int8", "uint8"} & {*kinds}:
        item["scale"] = np.asarray(quantized(dense, "int8")[1])
    return item


def _openai_beside(body: Body, found: Vectors) -> Body:
    """Return the other kinds of vectors, which stand beside the embedding."""
    (kind, *_), in_base64, _ = _openai_types(body)
    dtype = "float32" if kind in {"float", "base64"} else kind
    item: Body = {}
    if body.get("return_sparse"):
        item["sparse"] = _as_indices(found.sparse)
    if body.get("return_colbert"):
        vectors = pooled(found.colbert, body.get("colbert_pool_factor"))
        values, scales = quantized(vectors, dtype)
        item["colbert"] = [Encoded(row, dtype) for row in values] if in_base64 else values
        if scales is not None:
            item["colbert_scale"] = scales
    if body.get("muvera"):
        encoding = muvera(found.colbert, body["muvera"])
        item["muvera"] = Encoded(encoding, "float32") if in_base64 else encoding
    return item


def _as_indices(sparse: dict[int, float]) -> Body:
    ids = sorted(sparse)
    return {"indices": ids, "values": np.array([sparse[token] for token in ids])}


_OPENAI_TYPES = (*_TYPES, ["float", "int8"], *([kind] for kind in _TYPES), list(_TYPES))
_OPENAI_OPTIONS: dict[str, tuple[Any, ...]] = {
    "encoding_format": _OPENAI_TYPES,
    "embedding_type": _OPENAI_TYPES,
    "output_dtype": ("float", "int8", "uint8", "binary", "ubinary"),
    **dict.fromkeys(("dimensions", "output_dimension", "dimensionality"), (32, 64, 8, 65)),
    **dict.fromkeys(("input_type", "task", "task_type"), (*_TASKS, "unknown")),
    "prompt": (PROMPT,),
    "prompt_name": ("query", "clustering", "unknown"),
    "truncate_prompt_tokens": (-1, 3, ALL_TOKENS),
    "truncate": CUTS,
    "truncation": BOTH,
    "truncation_strategy": CUTS,
    "truncation_side": SIDES,
    **dict.fromkeys(("normalize", "normalized", "use_activation"), BOTH),
    "return_sparse": BOTH,
    "return_colbert": BOTH,
    "colbert_pool_factor": (2,),
    "muvera": ("query", "document"),
    "model": (),
}
_OPENAI_TOGETHER: tuple[Body, ...] = (
    *({"output_dtype": kind, "return_colbert": True} for kind in ("int8", "uint8", "binary")),
    *({"encoding_format": "base64", "output_dtype": kind} for kind in ("int8", "ubinary")),
    {"return_colbert": True, "colbert_pool_factor": 2, "return_sparse": True},
    {"dimensions": 32, "normalize": False},
    {"return_colbert": True, "return_sparse": True, "prompt": PROMPT},
    {"embedding_type": ["float", "int8"], "return_colbert": True},
)


def _cohere(served: Served, question: Any) -> Body:
    body = question.body
    sent = [body[name] for name in ("texts", "images", "inputs") if body.get(name)]
    if len(sent) > 1:
        raise RefusedError
    texts = [*map(Picture, sent[0])] if body.get("images") else texts_of(sent[0])
    if body.get("input_type") == "image" and not all(isinstance(text, Picture) for text in texts):
        raise RefusedError
    types = _listed(body.get("embedding_types"))
    prompt = _task_prompt(served, body.get("input_type") or "search_document", "document")
    options = read_options(body, prompt)
    width = body.get("output_dimension")
    dense = [_dense(served, text, options, normalize=True, width=width) for text in texts]
    tokens = sum(len(served.dense_model.vectors(text, options).ids.read) for text in texts)
    is_v1 = "/v1/" in question.operation.path
    embeddings: Any = {
        kind: [_as_type(vector, kind) for vector in dense] for kind in types or ["float"]
    }
    if is_v1 and not types:
        embeddings = dense
    return {
        "embeddings": embeddings,
        "texts": [text for text in texts if isinstance(text, str)],
        "meta": {
            "api_version": {"version": "1" if is_v1 else "2"},
            "billed_units": {"input_tokens": tokens},
        },
        "response_type": "embeddings_floats" if is_v1 and not types else "embeddings_by_type",
    }


# The API of text-embeddings-inference.


def _tei_options(served: Served, body: Body) -> ReadingOptions:
    return read_options(body, served.prompt(body.get("prompt_name")))


def _tei_dense(served: Served, question: Any) -> list[Any]:
    body = question.body
    options, normalize = _tei_options(served, body), body.get("normalize") is not False
    width = body.get("dimensions")
    texts = texts_of(body["inputs"])
    return [_dense(served, text, options, normalize=normalize, width=width) for text in texts]


def _embedding_server(served: Served, question: Any) -> Body:
    options = _tei_options(served, question.body)
    texts = texts_of(question.body["inputs"])
    data = [
        {"embedding": vector, "index": index}
        for index, vector in enumerate(_tei_dense(served, question))
    ]
    tokens = sum(len(served.dense_model.vectors(text, options).ids.read) for text in texts)
    return {"data": data, "usage": usage(tokens)}


def _tei_sparse(served: Served, question: Any) -> list[Any]:
    body = question.body
    model = served.token_model
    options = read_options(body, served.prompt(body.get("prompt_name"), model))
    return [
        [{"index": token, "value": np.asarray(weight)} for token, weight in sorted(sparse.items())]
        for sparse in (model.vectors(text, options).sparse for text in texts_of(body["inputs"]))
    ]


_TEI_OPTIONS: dict[str, tuple[Any, ...]] = {
    "truncate": BOTH,
    "truncation_direction": SIDES,
    "prompt_name": ("query", "clustering", "unknown"),
}


def _ollama_options(served: Served, body: Body) -> ReadingOptions:
    options = read_options(body, served.prompt(None))
    context = (body.get("options") or {}).get("num_ctx")
    if context is None:
        return options
    special = len(served.dense_model.begin) + len(served.dense_model.end)
    return replace(options, most=max(1, context - special))


def _ollama(served: Served, question: Any) -> Body:
    body, model = question.body, served.dense_model
    options, width = _ollama_options(served, body), body.get("dimensions") or None
    texts = texts_of(body["input"])
    return {
        "model": model.name,
        "embeddings": [
            _dense(served, text, options, normalize=True, width=width) for text in texts
        ],
        "prompt_eval_count": sum(len(model.vectors(text, options).ids.read) for text in texts),
    }


def _ollama_prompt(served: Served, question: Any) -> Body:
    options = _ollama_options(served, question.body)
    text = question.body["prompt"]
    return {"embedding": _dense(served, text, options, normalize=False, width=None)}


_OLLAMA_OPTIONS: dict[str, tuple[Any, ...]] = {"options.num_ctx": (1, 5, 10_000), "model": ()}


def _tokens(served: Served, question: Any) -> list[Any]:
    body = question.body
    model = served.dense_model
    prompt = served.prompt(body.get("prompt_name"))
    answer = []
    for text in texts_of(body["inputs"]):
        whole = prompt + text
        found = model.tokenizer.encode(whole, add_special_tokens=False)
        plain = [
            {"id": token, "text": whole[start:stop], "special": False, "start": start, "stop": stop}
            for token, (start, stop) in zip(found.ids, found.offsets, strict=True)
        ]
        before, after = (model.begin, model.end)
        if body.get("add_special_tokens") is False:
            before = after = []
        answer.append([*_special(model, before), *plain, *_special(model, after)])
    return answer


def _special(model: M3 | Clip | Qwen, ids: list[int]) -> list[Body]:
    nowhere = {"special": True, "start": None, "stop": None}
    return [{"id": token, "text": model.tokenizer.id_to_token(token)} | nowhere for token in ids]


_INPUTS: tuple[Body, ...] = ({"inputs": SHORT}, {"inputs": LONG}, {"inputs": SHORT[0]})


def _as_content(item: Any) -> Body:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    return {"type": "image_url", "image_url": {"url": item["image"]}}


_COHERE_RULE = Rule(
    ("texts",),
    (
        {"texts": SHORT},
        {"texts": LONG},
        {"images": [*PICTURES]},
        {"inputs": [{"content": [_as_content(item)]} for item in MIXED]},
    ),
    {
        "input_type": ("search_document", "search_query", "classification", "clustering", "image"),
        "images": ([data_url(b"no picture")],),
        "embedding_types": (*([kind] for kind in _TYPES), list(_TYPES)),
        "output_dimension": (32, 64, 8, 65),
        "truncate": ("NONE", "START", "END"),
        "inputs": ([{"content": [{"type": "text", "text": "river"}]}],),
        "max_tokens": (1, 3, 100),
        "model": (),
    },
    _cohere,
    frozenset({"id"}),
    ({"input_type": "search_query", "truncate": "START"},),
)
VECTOR_RULES: dict[str, Rule] = {
    "EmbeddingResponse|Base64Response": Rule(
        ("sentences",),
        ({"sentences": SHORT}, {"sentences": LONG}, {"sentences": MIXED}),
        _NATIVE_OPTIONS,
        _embeddings,
        frozenset({"processing_time_ms", "timings_ms", "message", "vector_space"}),
        _NATIVE_TOGETHER,
        (JSON, SAFETENSORS),
    ),
    "OpenAIEmbeddings": Rule(
        ("input",),
        (
            {"input": SHORT},
            {"input": LONG},
            {"input": SHORT[0]},
            {"input": [{"text": SHORT[0]}, SHORT[1]]},
            {"input": MIXED},
        ),
        _OPENAI_OPTIONS,
        _openai,
        frozenset({"message"}),
        _OPENAI_TOGETHER,
    ),
    "CohereEmbeddings": _COHERE_RULE,
    "CohereVectors|CohereEmbeddings": _COHERE_RULE,
    "DenseVectors": Rule(
        ("inputs",),
        _INPUTS,
        _TEI_OPTIONS | {"normalize": BOTH, "dimensions": (32, 64, 8, 65)},
        _tei_dense,
        together=TEI_TOGETHER,
    ),
    "EmbeddingServerResponse": Rule(
        ("inputs",),
        _INPUTS,
        _TEI_OPTIONS | {"normalize": BOTH, "dimensions": (32, 64, 8, 65)},
        _embedding_server,
        frozenset({"timings"}),
        TEI_TOGETHER,
    ),
    "SparseVectors": Rule(("inputs",), _INPUTS, _TEI_OPTIONS, _tei_sparse, together=TEI_TOGETHER),
    "OllamaEmbeddings": Rule(
        ("input",),
        ({"input": SHORT}, {"input": LONG}, {"input": SHORT[0]}),
        _OLLAMA_OPTIONS | {"truncate": BOTH, "dimensions": (0, 32, 64, 8, 65)},
        _ollama,
        frozenset({"total_duration", "load_duration"}),
        ({"truncate": False, "options": {"num_ctx": 5}},),
    ),
    "OllamaEmbedding": Rule(
        ("prompt",), ({"prompt": SHORT[0]}, {"prompt": LONG[0]}), _OLLAMA_OPTIONS, _ollama_prompt
    ),
    "Tokens": Rule(
        ("inputs",),
        _INPUTS,
        {"add_special_tokens": BOTH, "prompt_name": ("query", "unknown")},
        _tokens,
    ),
}
