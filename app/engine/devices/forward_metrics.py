"""Updates the metrics of a forward and of the wait before it."""

from app.engine.scheduling.batch import Batch
from app.engine.scheduling.job import Purpose
from app.observability.metrics import Metrics


def observe_wait(metrics: Metrics, batch: Batch) -> None:
    """Count the wait of each job whose first sequences are taken for the first time."""
    if batch.handed_over:
        return
    for batch_slice in batch.slices:
        taken_at = batch_slice.job.first_taken_at
        if batch_slice.start == 0 and taken_at is not None:
            metrics.queue_wait.observe(taken_at - batch_slice.job.enqueued_at)


def observe_forward(metrics: Metrics, batch: Batch, seconds: float) -> None:
    """Count a forward of `seconds`."""
    metrics.tokens.labels(batch.model.name).inc(batch.tokens)
    metrics.batch_tokens.observe(batch.tokens)
    embedded = batch.count(Purpose.EMBEDDING)
    if embedded:
        metrics.batch_size.observe(embedded)
        metrics.embedding_inference.observe(seconds)
    if batch.count(Purpose.RERANKING):
        metrics.rerank_inference.observe(seconds)
