"""text-embeddings-inference: texts to tokens, and back."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from app.api import paths
from app.api.checks import check_texts
from app.api.dialects import tei_schemas as schemas
from app.api.dialects.tei import add_operation
from app.api.handler import Call, Operation
from app.api.model_catalogue import Role, ServedModel
from app.api.openapi import BEARER
from app.api.paths import Dialect
from app.api.rendering import render_items
from app.engine.loaded_models import LoadedModels
from app.engine.model import Model
from app.engine.types import SpecialToken, TokenSpans
from app.errors import InvalidRequestError

router = APIRouter(dependencies=[BEARER])

# Each character may be a token, and each token takes about 60 bytes of the answer.
_MOST_CHARACTERS = 1_000_000
_TOKENS_PER_CHUNK = 4096
_BYTES_PER_TOKEN = 60


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
    characters = sum(map(len, body.inputs))
    if characters > _MOST_CHARACTERS:
        raise InvalidRequestError(
            f"the texts have {characters} characters, and at most {_MOST_CHARACTERS} are tokenised "
            "at once: send fewer"
        )

    def split(models: LoadedModels) -> tuple[Model, list[str], list[TokenSpans]]:
        tokenizer = loaded(model, models)
        prompt = _prompt(tokenizer, body.prompt_name)
        texts = [prompt + text for text in body.inputs]
        return tokenizer, texts, [tokenizer.token_spans(text) for text in texts]

    tokenizer, texts, spans = await call.service.engine.run_tokenizer(
        split, body.inputs, client=call.context.client, model=model.key
    )
    frame = tokenizer.special_tokens if body.add_special_tokens is not False else ([], [])
    render = partial(_render_tokens, texts, spans, frame)
    return await call.render(render, _BYTES_PER_TOKEN * sum(len(each.ids) for each in spans))


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
    spans: list[TokenSpans],
    frame: tuple[list[SpecialToken], list[SpecialToken]],
) -> Iterator[bytes]:
    before, after = (list(map(_special, tokens)) for tokens in frame)
    return render_items(
        render_items((orjson.dumps(items)[1:-1],) for items in (before, *plain, after) if items)
        for text, tokens in zip(texts, spans, strict=True)
        for plain in [_plain(text, tokens)]
    )


def _special(token: SpecialToken) -> dict[str, Any]:
    return {"id": token.id, "text": token.string, "special": True, "start": None, "stop": None}


def _plain(text: str, tokens: TokenSpans) -> Iterator[list[dict[str, Any]]]:
    for begin in range(0, len(tokens.ids), _TOKENS_PER_CHUNK):
        part = slice(begin, begin + _TOKENS_PER_CHUNK)
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

    def decode(models: LoadedModels) -> list[str]:
        tokenizer = loaded(model, models)
        return [tokenizer.decode(ids, skip_special_tokens=skip) for ids in body.ids]

    texts = await call.service.engine.run_tokenizer(
        decode, [], client=call.context.client, model=model.key
    )
    return await call.render(lambda: [orjson.dumps(texts)], sum(map(len, texts)))


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
