"""The real service with five wrong answers, each of which a client can see."""

import dataclasses

from app import answers
from app.error_responses import STATUS_OF
from app.main import create_app
from app.routers import rerank, stats
from app.server import run
from smart_embedder.errors import EmptyInputError

_matrix = answers.render_matrix
_truncation = answers.truncation_as_json
_count = stats.totals
_rerank = answers.render_rerank


def drop_a_vector(matrix):
    return _matrix(None if matrix is None else matrix[:-1])


def miscount(truncation, field):
    return _truncation(
        dataclasses.replace(truncation, original_tokens=truncation.original_tokens + 1), field
    )


def exaggerate(metrics):
    totals = _count(metrics)
    return totals | {"total_sentences": totals["total_sentences"] + 1}


def by_rising_score(passages, result, model):
    start, opening, *items, closing, end = _rerank(passages, result, model)
    return [start, opening, *reversed(items), closing, end]


if __name__ == "__main__":
    answers.render_matrix = drop_a_vector
    answers.truncation_as_json = miscount
    stats.totals = exaggerate
    rerank.render_rerank = by_rising_score
    STATUS_OF[EmptyInputError] = 422
    run(create_app)
