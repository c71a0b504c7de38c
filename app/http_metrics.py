"""The Prometheus metrics of one service, in one object with its own registry.

Each series exists at zero from the start. Labels hold fixed words and names that the operator
chose, never input of a client.
/stats reads the same counters, so the two always agree.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric

from app.logs import lines_dropped
from app.settings import Settings
from smart_embedder import __version__
from smart_embedder.core import EngineCore
from smart_embedder.interface import LoadedModels, ModelState
from smart_embedder.metrics import EngineMetrics
from smart_embedder.settings import EngineSettings, public_name

if sys.platform == "linux":
    import resource

STATUSES: Final = ("success", "client_error", "error", "timeout")
# The `reason` of a rejected request, by the code of its error.
REASON_OF: Final = {
    "queue_full": "backpressure",
    "rate_limited": "rate_limit",
    "unauthorized": "auth",
    "body_too_large": "body_too_large",
    "loading": "loading",
    "model_not_loaded": "model",
    "model_too_large": "model",
    "draining": "draining",
    "unhealthy": "unhealthy",
    "reranker_disabled": "disabled",
    "foreign_origin": "origin",
}
REJECTION_REASONS: Final = tuple(dict.fromkeys(REASON_OF.values()))
EMBEDDING_ENDPOINT: Final = "/embeddings/"
RERANK_ENDPOINT: Final = "/rerank"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LATENESS_INTERVAL = 0.1
_PAUSES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


# Names with series of their own; API_TOKENS_FILE has rarely more.
_MAX_CLIENTS = 1000
_OTHER_CLIENTS = "(others)"


@dataclass(frozen=True, slots=True)
class ClientMetrics:
    """The counters of the requests with one named token."""

    requests: Counter
    rejected: Counter
    tokens: Counter


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """The metrics of one endpoint for work, by status and by reason."""

    requests: dict[str, Counter]
    rejected: dict[str, Counter]
    duration: Histogram
    active: Gauge


class _ProcessCollector(ProcessCollector):
    """Reports open files even at their limit, when the library cannot open /proc to count them."""

    def collect(self) -> Iterable[Metric]:
        families = [*super().collect()]
        if sys.platform == "linux" and not any(f.name == "process_open_fds" for f in families):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            for name in ("open", "max"):
                description = f"File descriptors: {name}."
                families.append(GaugeMetricFamily(f"process_{name}_fds", description, value=limit))
        return families


class Metrics(EngineMetrics):
    """The metrics of one service; each app has its own."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)

        # Requests.
        self.embedding_requests = counter(
            "embedding_requests_total", "Embedding requests answered", ["status", "endpoint"]
        )
        self.embedding_rejected = counter(
            "embedding_requests_rejected_total", "Embedding requests refused", ["reason"]
        )
        self.sentences = counter("embedding_sentences_processed_total", "Sentences embedded")
        self.embedding_duration = histogram(
            "embedding_request_duration_seconds", "Whole embedding request", ["endpoint"]
        )
        self.embedding_active = gauge("embedding_active_requests", "Embedding requests in work")
        self.rerank_requests = counter(
            "rerank_requests_total", "Rerank requests answered", ["status"]
        )
        self.rerank_rejected = counter(
            "rerank_requests_rejected_total", "Rerank requests refused", ["reason"]
        )
        self.pairs = counter("rerank_pairs_processed_total", "Query-passage pairs scored")
        self.rerank_duration = histogram("rerank_request_duration_seconds", "Whole rerank request")
        self.rerank_active = gauge("rerank_active_requests", "Rerank requests in work")
        self.tokenize_requests = counter(
            "embedder_tokenize_requests_total", "Requests to tokenize answered", ["status"]
        )
        self.tokenize_rejected = counter(
            "embedder_tokenize_requests_rejected_total", "Requests to tokenize refused", ["reason"]
        )
        self.tokenize_duration = histogram(
            "embedder_tokenize_request_duration_seconds", "Whole request to tokenize"
        )
        self.tokenize_active = gauge(
            "embedder_tokenize_active_requests", "Requests to tokenize in work"
        )
        self.client_requests = counter(
            "embedder_client_requests_total", "Requests with a named token", ["client"]
        )
        self.client_rejected = counter(
            "embedder_client_requests_rejected_total",
            "Requests with a named token that were refused",
            ["client"],
        )
        self.client_tokens = counter(
            "embedder_client_tokens_total", "Tokens of the texts of a named token", ["client"]
        )
        self._by_client: dict[str, ClientMetrics] = {}
        self.tokens_file_unreadable = gauge(
            "embedder_tokens_file_unreadable",
            "1 while API_TOKENS_FILE cannot be read and the old tokens stay valid, else 0",
        )
        self.lateness = histogram(
            "embedder_event_loop_lateness_seconds",
            "How late the event loop runs a timer that is due ten times a second",
            buckets=_PAUSES,
        )

        registry.register(lines_dropped)
        self._create_engine_metrics()

    def _create_engine_metrics(self) -> None:
        """Create the metrics of the engine and the process, then all series, at zero."""
        registry = self.registry
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)

        self.batch_size = histogram("embedding_batch_size", "Texts in one forward", buckets=_TEXTS)
        self.batch_tokens = histogram(
            "embedder_batch_tokens", "Tokens in one forward", buckets=_TOKENS
        )
        self.embedding_inference = histogram(
            "embedding_gpu_inference_duration_seconds", "One embedding forward"
        )
        self.rerank_inference = histogram("rerank_inference_duration_seconds", "One rerank forward")
        self.queue_wait = histogram("embedder_queue_wait_seconds", "Wait before the first forward")
        self.tokenize = histogram("embedder_tokenize_seconds", "Tokenization of one request")
        self.tokens = counter(
            "embedder_tokens_processed_total", "Tokens through a model", ["model"]
        )
        self.splits = counter(
            "embedder_out_of_memory_splits_total", "Batches split for lack of memory"
        )
        self.abandoned = counter("embedder_abandoned_requests_total", "Requests whose client left")
        self.queue_size = gauge("embedding_queue_size", "Embedding requests waiting")
        self.queue_capacity = gauge(
            "embedder_embedding_queue_capacity", "Embedding requests that may wait"
        )
        self.rerank_capacity = gauge(
            "embedder_rerank_queue_capacity", "Rerank requests accepted at once"
        )
        self.stuck_seconds = gauge(
            "embedder_device_stuck_seconds",
            "Seconds since a forward last returned, while one takes over twice its limit; else 0",
        )

        # Models.
        self.model_state = gauge(
            "embedder_model_state", "1 for the state that a model is in, else 0", ["model", "state"]
        )
        self.model_requests = gauge(
            "embedder_model_requests",
            "Requests that use a model of MODELS or wait for it",
            ["model"],
        )
        self.model_loads = counter(
            "embedder_model_loads_total", "Times a model of MODELS was loaded", ["model", "result"]
        )
        self.model_unloads = counter(
            "embedder_model_unloads_total", "Times a model of MODELS was unloaded", ["model"]
        )
        self.model_replacements = counter(
            "embedder_model_replacements_total",
            "Times a model of MODELS was loaded from changed files",
            ["model"],
        )

        # The cache.
        self.embedding_cache_hits = counter(
            "embedder_cache_hits_total",
            "Texts whose vectors were in the cache, counted for each model",
        )
        self.embedding_cache_misses = counter(
            "embedder_cache_misses_total",
            "Texts whose vectors were not in the cache, counted for each model",
        )
        self.embedding_cache_bytes = gauge(
            "embedder_cache_bytes", "Memory that the embedding cache takes in this process"
        )
        self.embedding_cache_entries = gauge(
            "embedder_cache_entries", "Entries of the embedding cache, one for each text and model"
        )

        # The gauges of each kind of memory, the older name first.
        self.memory = {
            kind: [
                gauge(f"{prefix}gpu_memory_{kind}_bytes", f"GPU memory {kind} by this process")
                for prefix in ("embedding_", "")
            ]
            for kind in ("allocated", "reserved")
        } | {
            kind: [gauge(f"gpu_memory_{kind}_bytes", f"GPU memory {kind} on the device in use")]
            for kind in ("free", "total")
        }

        for counter_of_label, labels in (
            (self.rerank_requests, STATUSES),
            (self.embedding_rejected, REJECTION_REASONS),
            (self.rerank_rejected, REJECTION_REASONS),
            (self.tokenize_requests, STATUSES),
            (self.tokenize_rejected, REJECTION_REASONS),
        ):
            for label in labels:  # The series exists at zero from now on.
                counter_of_label.labels(label)
        self.server = Info("embedding_server", "Models and limits", registry=registry)
        build = Info("embedder_build", "Version of the software", registry=registry)
        build.info({"version": __version__})
        # Memory, CPU time, open files and start time of this process, on Linux.
        _ProcessCollector(registry=registry)

    def embedding_endpoint(self, endpoint: str) -> EndpointMetrics:
        """The metrics of one endpoint that embeds; creates its series at zero."""
        requests, rejected = self.embedding_requests, self.embedding_rejected
        return EndpointMetrics(
            requests={status: requests.labels(status, endpoint) for status in STATUSES},
            rejected={reason: rejected.labels(reason) for reason in REJECTION_REASONS},
            duration=self.embedding_duration.labels(endpoint),
            active=self.embedding_active,
        )

    def rerank_endpoint(self) -> EndpointMetrics:
        """The metrics of reranking, in every dialect."""
        return EndpointMetrics(
            requests={status: self.rerank_requests.labels(status) for status in STATUSES},
            rejected={reason: self.rerank_rejected.labels(reason) for reason in REJECTION_REASONS},
            duration=self.rerank_duration,
            active=self.rerank_active,
        )

    def tokenize_endpoint(self) -> EndpointMetrics:
        """The metrics of requests for tokens or texts, which need no forward."""
        requests, rejected = self.tokenize_requests, self.tokenize_rejected
        return EndpointMetrics(
            requests={status: requests.labels(status) for status in STATUSES},
            rejected={reason: rejected.labels(reason) for reason in REJECTION_REASONS},
            duration=self.tokenize_duration,
            active=self.tokenize_active,
        )

    def client(self, name: str) -> ClientMetrics:
        """The metrics of a named token; creates its series at zero."""
        known = self._by_client
        if name not in known and len(known) >= _MAX_CLIENTS:
            name = _OTHER_CLIENTS
        if name not in known:
            counters = self.client_requests, self.client_rejected, self.client_tokens
            known[name] = ClientMetrics(*(counter.labels(name) for counter in counters))
        return known[name]

    def tokenized(self, seconds: float) -> None:
        """Observe the tokenization of one request."""
        self.tokenize.observe(seconds)

    def waited(self, seconds: float) -> None:
        """Observe the time for which a job waited for its first forward."""
        self.queue_wait.observe(seconds)

    def computed(self, model: str, *, texts: int, pairs: int, tokens: int, seconds: float) -> None:
        """Count one forward, for embedding, for reranking or for both."""
        self.tokens.labels(model).inc(tokens)
        self.batch_tokens.observe(tokens)
        if texts:
            self.batch_size.observe(texts)
            self.embedding_inference.observe(seconds)
        if pairs:
            self.rerank_inference.observe(seconds)

    def split(self) -> None:
        """Count a batch that was split because it did not fit into memory."""
        self.splits.inc()

    def cached(self, hits: int, misses: int) -> None:
        """Count the texts of a request by whether the cache had their vectors."""
        self.embedding_cache_hits.inc(hits)
        self.embedding_cache_misses.inc(misses)

    def loaded(self, model: str, *, ok: bool) -> None:
        """Count a loading."""
        self.model_loads.labels(model, "success" if ok else "failure").inc()

    def replaced(self, model: str) -> None:
        """Count a loading from changed files."""
        self.model_replacements.labels(model).inc()

    def unloaded(self, model: str) -> None:
        """Count an unloading."""
        self.model_unloads.labels(model).inc()

    def watch(self, engine: EngineCore, settings: EngineSettings) -> None:
        """Let the gauges read the engine when they are scraped; create the models' series."""
        self.queue_capacity.set(settings.max_queue_size)
        self.rerank_capacity.set(settings.rerank_max_queue)
        self.queue_size.set_function(lambda: engine.waiting)
        self.stuck_seconds.set_function(lambda: engine.stuck_seconds)
        if (cache := engine.cache) is not None:
            self.embedding_cache_bytes.set_function(lambda: cache.nbytes)
            self.embedding_cache_entries.set_function(lambda: cache.count)
        states = [state.value for state in ModelState]
        for index, model in enumerate(engine.statuses):
            self.watch_model(model.name, states, partial(_read_state, engine, index))
            if model.requests is not None:  # One of MODELS.
                self.watch_further_model(model.name, partial(_count_requests, engine, index))

    def watch_model(self, name: str, states: Sequence[str], read: Callable[[], str]) -> None:
        """Create the series of a model; the gauges of its states call `read` when scraped."""
        self.tokens.labels(name)
        for state in states:
            is_in = partial(lambda state: float(read() == state), state)
            self.model_state.labels(name, state).set_function(is_in)

    def watch_further_model(self, name: str, requests: Callable[[], int]) -> None:
        """Create the series of a model of MODELS; its gauge reads `requests` when it is scraped."""
        self.model_requests.labels(name).set_function(requests)
        for result in ("success", "failure"):
            self.model_loads.labels(name, result)
        self.model_unloads.labels(name)
        self.model_replacements.labels(name)

    def watch_memory(self, read: Callable[[str], int]) -> None:
        """Let the memory gauges read the bytes of each kind when they are scraped."""
        for kind, gauges in self.memory.items():
            for gauge in gauges:
                gauge.set_function(partial(read, kind))

    def value(self, name: str, **labels: str) -> float:
        """The present value of one series; 0 if it does not exist."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def total(self, counter: Counter) -> int:
        """The sum of a counter over all its labels."""
        samples = (sample for metric in counter.collect() for sample in metric.samples)
        return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))

    def render(self) -> bytes:
        """Render all series in Prometheus' text format."""
        return generate_latest(self.registry)


def _read_state(engine: EngineCore, index: int) -> str:
    return engine.statuses[index].state.value


def _count_requests(engine: EngineCore, index: int) -> int:
    return engine.statuses[index].requests or 0


async def measure_lateness(lateness: Histogram) -> None:
    """Observe how late the event loop is, until cancelled; a blocked loop delays every request."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LATENESS_INTERVAL
        await asyncio.sleep(_LATENESS_INTERVAL)
        lateness.observe(max(0.0, loop.time() - due))


def describe_server(settings: Settings, models: LoadedModels) -> dict[str, str]:
    """The labels of embedding_server_info, with the effective lengths; `none` without a model."""
    kinds = ("bge_embed", "qwen_embed", "bge_rerank", "qwen_rerank")
    lengths: dict[str, int | str] = dict.fromkeys((f"{kind}_max_length" for kind in kinds), "none")
    lengths["bge_embed_max_length"] = models.embedder.max_length
    if models.dense is not None:
        lengths["qwen_embed_max_length"] = models.dense.max_length
    if models.late_interaction:
        lengths["bge_rerank_max_length"] = models.embedder.max_length
    elif models.reranker is not None:
        kind = "qwen" if models.reranker.always_normalizes else "bge"
        lengths[f"{kind}_rerank_max_length"] = models.reranker.max_length
    return {
        "model": public_name(settings.embedding_model),
        "dense_embedding_model": public_name(settings.dense_model),
        "reranker_model": public_name(settings.reranker_model),
        **{name: str(length) for name, length in lengths.items()},
        "version": __version__,
        "gpu_available": str(models.device.gpu_available).lower(),
        "device": models.device.name,
    }
