"""text-embeddings-inference: texts to tokens, and back."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from app.api import paths
from app.api.checks import check_texts
from app.api.dialects import tei_schemas as schemas
from app.api.dialects.tei import add_operation
from app.api.handler import Call, Operation, cancel_on_disconnect
from app.api.model_catalogue import Role, ServedModel
from app.api.openapi import BEARER
from app.api.paths import Dialect
from app.api.rendering import render_items, render_list
from app.engine.admission.tokenizer_threads import stop_if_given_up
from app.engine.loaded_models import LoadedModels
from app.engine.model import Model
from app.engine.types import SpecialToken, TokenSpans
from app.errors import InvalidRequestError

router = APIRouter(dependencies=[BEARER])

_TOKENS_PER_CHUNK = 4096
# Of the answer, about: numbers of four digits and a word.
_BYTES_PER_TOKEN = 64
# Of a string with other letters than ASCII's in memory.
_BYTES_PER_CHARACTER = 4
_ADVICE = "send fewer texts or shorter ones"

Result = TypeVar("Result")


def model_of(call: Call) -> ServedModel:
    """The model in the request's path, or the one that makes dense vectors."""
    name = call.request.path_params.get("model")
    catalogue = call.service.catalogue
    return catalogue.embedder(None) if name is None else catalogue.find(name)


def loaded(model: ServedModel, models: LoadedModels) -> Model:
    """The loaded model behind one that is served."""
    of_role = {
        Role.EMBEDDER: models.embedder,
        Role.DENSE: models.dense,
        Role.RERANKER: models.reranker,
    }
    found = of_role[model.role]
    assert found is not None  # noqa: S101 - what is served is loaded
    return found


async def _tokenize(body: schemas.TokenizeRequest, call: Call) -> Response:
    check_texts(body.inputs, "inputs", call.service.settings)
    model = model_of(call)
    answer = call.context.answer

    def split(models: LoadedModels) -> tuple[Model, list[str], list[list[TokenSpans]], int]:
        tokenizer = loaded(model, models)
        prompt = _prompt(tokenizer, body.prompt_name)
        texts = [prompt + text for text in body.inputs]
        spans: list[list[TokenSpans]] = [[] for _ in texts]
        tokens = 0
        for text, own in zip(texts, spans, strict=True):
            for part in tokenizer.token_spans(text):
                tokens += len(part.ids)
                answer.check(_BYTES_PER_TOKEN * tokens, *_tokens_needed(tokens))
                own.append(part)
        return tokenizer, texts, spans, tokens

    tokenizer, texts, spans, tokens = await _on_tokenizer_thread(call, split, body.inputs, model)
    answer.need(_BYTES_PER_TOKEN * tokens, *_tokens_needed(tokens))
    frame = tokenizer.special_tokens if body.add_special_tokens is not False else ([], [])
    render = partial(_render_tokens, texts, spans, frame)
    return await call.render(render)


def _tokens_needed(tokens: int) -> tuple[str, str]:
    return f"{tokens} tokens of these texts", _ADVICE


async def _on_tokenizer_thread(
    call: Call, work: Callable[[LoadedModels], Result], texts: list[str], model: ServedModel
) -> Result:
    """The result of `work` on `texts`, which is given up where the client leaves."""
    run = call.service.engine.run_tokenizer(
        work, texts, client=call.context.client, model=model.key
    )
    return await cancel_on_disconnect(call.request, run)


def _prompt(model: Model, name: str | None) -> str:
    if name is None:
        return ""
    prompts: Mapping[str, str] = getattr(model, "prompts", {})
    if name not in prompts:
        raise InvalidRequestError(
            f"the field prompt_name is unknown to {model.name}: it has "
            f"{', '.join(prompts) or 'no prompts'}"
        )
    return prompts[name]


def _render_tokens(
    texts: list[str],
    spans: list[list[TokenSpans]],
    frame: tuple[list[SpecialToken], list[SpecialToken]],
) -> Iterator[bytes]:
    before, after = (list(map(_special, tokens)) for tokens in frame)
    return render_items(
        render_items(
            (orjson.dumps(items)[1:-1],)
            for items in chain([before], _plain(text, parts), [after])
            if items
        )
        for text, parts in zip(texts, spans, strict=True)
    )


def _special(token: SpecialToken) -> dict[str, Any]:
    return {"id": token.id, "text": token.string, "special": True, "start": None, "stop": None}


def _plain(text: str, parts: list[TokenSpans]) -> Iterator[list[dict[str, Any]]]:
    pieces = (
        (tokens, slice(begin, begin + _TOKENS_PER_CHUNK))
        for tokens in parts
        for begin in range(0, len(tokens.ids), _TOKENS_PER_CHUNK)
    )
    for tokens, part in pieces:
        ids, starts, stops = (
            each[part].tolist() for each in (tokens.ids, tokens.starts, tokens.stops)
        )
        yield [
            {"id": id_, "text": text[start:stop], "special": False, "start": start, "stop": stop}
            for id_, start, stop in zip(ids, starts, stops, strict=True)
        ]


async def _decode(body: schemas.DecodeRequest, call: Call) -> Response:
    check_texts(body.ids, "ids", call.service.settings)
    model, skip = model_of(call), body.skip_special_tokens is not False
    answer = call.context.answer

    def decode(models: LoadedModels) -> tuple[list[str], int]:
        tokenizer = loaded(model, models)
        texts: list[str] = []
        size = 0
        for ids in body.ids:
            stop_if_given_up()
            texts.append(tokenizer.decode(ids, skip_special_tokens=skip))
            size += _BYTES_PER_CHARACTER * len(texts[-1])
            answer.check(size, f"{len(texts)} of these texts", _ADVICE)
        return texts, size

    texts, size = await _on_tokenizer_thread(call, decode, [], model)
    answer.need(size, "these texts", _ADVICE)
    return await call.render(partial(render_list, texts))


add_operation(
    router,
    Operation(Dialect.TEI, paths.TEI_TOKENIZE, "inputs", schemas.TokenizeRequest, _tokenize),
    schemas.Tokens,
    "The tokens that the model reads of each text, none of which is cut.",
)
add_operation(
    router,
    Operation(Dialect.TEI, paths.TEI_DECODE, "ids", schemas.DecodeRequest, _decode),
    schemas.Texts,
    "The text of each list of the model's own token ids.",
)
