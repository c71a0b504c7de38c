"""The whole service, short of memory outside the model: `python -m tests.faults.forgetful_server`.

A request with the text "parsing", "tokenising" or "rendering" finds no memory in that stage.
"""

import dataclasses
from functools import partial

from smart_embedder.api.formats import vectors
from smart_embedder.api.schemas import EmbeddingRequest
from smart_embedder.engine.model import LoadedModels
from smart_embedder.main import create_app
from smart_embedder.models.load import load_models
from smart_embedder.server.process import run
from smart_embedder.settings import Settings

_render, _validate = vectors.render, EmbeddingRequest.model_validate


def validate(body, **options):
    _remember("parsing" not in body["sentences"])
    return _validate(body, **options)


class ForgetfulModel:
    """A real model behind a tokenizer that some texts are too much for."""

    def __init__(self, model) -> None:
        self._model = model

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def tokenize(self, texts, *options, **more):
        _remember("tokenising" not in texts)
        return self._model.tokenize(texts, *options, **more)


def render(answer, **options):
    _remember("rendering" not in answer.request.texts)
    return _render(answer, **options)


def _remember(enough: bool) -> None:
    if not enough:
        raise MemoryError


def load(settings: Settings) -> LoadedModels:
    models = load_models(settings)
    return dataclasses.replace(models, embedder=ForgetfulModel(models.embedder))


if __name__ == "__main__":
    EmbeddingRequest.model_validate = validate
    vectors.render = render
    run(partial(create_app, loader=load))
