"""The real service with five wrong responses, all visible to a client."""

import dataclasses

from app import answers
from app.error_responses import STATUS_OF
from app.main import create_app
from app.routers import rerank, stats
from app.run import run
from smart_embedder.errors import EmptyInputError

_render_matrix = answers.render_matrix
_truncation_as_json = answers.truncation_as_json
_sum_totals = stats.sum_totals
_render_rerank = answers.render_rerank


def drop_a_vector(matrix):
    return _render_matrix(None if matrix is None else matrix[:-1])


def miscount_tokens(truncation, field):
    return _truncation_as_json(
        dataclasses.replace(truncation, original_tokens=truncation.original_tokens + 1), field
    )


def miscount_sentences(metrics):
    totals = _sum_totals(metrics)
    return totals | {"total_sentences": totals["total_sentences"] + 1}


def sort_by_rising_score(passages, result, model):
    start, opening, *items, closing, end = _render_rerank(passages, result, model)
    return [start, opening, *reversed(items), closing, end]


if __name__ == "__main__":
    answers.render_matrix = drop_a_vector
    answers.truncation_as_json = miscount_tokens
    stats.sum_totals = miscount_sentences
    rerank.render_rerank = sort_by_rising_score
    STATUS_OF[EmptyInputError] = 422
    run(create_app)
