"""Settings of other servers, so that error messages can name ours instead.

The names are flags and environment variables of text-embeddings-inference 1.9 (embedding-server has
the same), infinity 0.0.78 and SIE 0.10, and some of vLLM. Names with the same meaning here are left
out.
"""

from collections.abc import Callable, Container, Mapping

# The settings with the same effect here, the likeliest first; or the reason why there is none.
_TEI: Mapping[str, tuple[str, ...] | str] = {
    "model_id": ("embedding_model", "reranker_model"),
    "revision": ("model_revision",),
    "tokenization_workers": ("tokenizer_threads",),
    "served_model_name": ("model_aliases",),
    "max_concurrent_requests": ("max_queue_size", "rerank_max_queue"),
    # There, a request in a batch is one text.
    "max_batch_requests": ("max_batch_sequences",),
    "max_client_batch_size": ("max_sentences_per_request", "max_rerank_passages"),
    "auto_truncate": "texts are cut and reported, unless a request has truncate=false",
    "default_prompt": ("query_prompt", "document_prompt"),
    "default_prompt_name": ("query_prompt", "document_prompt"),
    "dense_path": "the model's modules.json says what its dense layers are",
    "device_id": ("device",),
    "hf_api_token": ("hf_token",),
    "hostname": ("host",),
    "uds_path": "the model runs in the same process",
    "huggingface_hub_cache": ("hf_home",),
    "payload_limit": ("max_body_bytes",),
    "api_key": ("api_token",),
    "json_output": ("log_format",),
    "disable_spans": "the log holds no spans",
    "otlp_service_name": ("otel_service_name",),
    "prometheus_port": "/metrics is on the service's port",
    "cors_allow_origin": ("cors_origins",),
}
_INFINITY: Mapping[str, tuple[str, ...] | str] = {
    "batch_size": ("max_batch_sequences",),
    "trust_remote_code": "code of a model is never run",
    "engine": "there is one engine",
    "model_warmup": "models are always warmed",
    "vector_disk_cache": "vectors are kept in memory alone; see EMBEDDING_CACHE_BYTES",
    "lengths_via_tokenize": "lengths are always counted in tokens",
    "embedding_dtype": "a request chooses by output_dtype",
    "pooling_method": ("pooling",),
    "compile": "the service has kernels of its own",
    "bettertransformer": ("attention",),
    "url_prefix": "a proxy removes its prefix; see docs/network.md",
    "proxy_root_path": "a proxy names its prefix in X-Forwarded-Prefix; see docs/network.md",
    "redirect_slash": "a last slash changes nothing",
    "permissive_cors": ("cors_origins",),
    "queue_size": ("max_queue_size",),
    "home": ("hf_home",),
}
_SIE: Mapping[str, tuple[str, ...] | str] = {
    "models_dir": ("models",),
    "preload": ("models",),
    "bundle": "every kind of model is in one installation",
    "devices": ("device",),
    "local_cache": ("hf_home",),
    "cluster_cache": ("hf_home",),
    "hf_fallback": ("hf_hub_offline",),
    "max_request_body_bytes": ("max_body_bytes",),
    "tracing": ("otlp_endpoint",),
    "tracing_enabled": ("otlp_endpoint",),
    "instrumentation": "/metrics has the figures of batches",
    "verbose": ("log_level",),
    "json_logs": ("log_format",),
    "log_json": ("log_format",),
}
_VLLM: Mapping[str, tuple[str, ...] | str] = {
    "model": ("embedding_model", "reranker_model"),
    "max_model_len": ("bge_embed_max_length", "qwen_embed_max_length"),
    "max_num_seqs": ("max_batch_sequences",),
    "max_num_batched_tokens": ("max_batch_tokens",),
}
NAMES = {**_VLLM, **_SIE, **_INFINITY, **_TEI}
_PREFIXES = ("infinity_", "sie_")
# Shells and containers set these too.
_SYSTEM_VARIABLES = {"HOSTNAME"}


def _find(name: str, settings: Container[str]) -> tuple[str, ...] | str | None:
    name = bare = name.lower().lstrip("-").replace("-", "_")
    for prefix in _PREFIXES:
        bare = bare.removeprefix(prefix)
    return (bare,) if bare != name and bare in settings else NAMES.get(bare)


def advice(name: str, write: Callable[[str], str], settings: Container[str]) -> str | None:
    """Return advice for the name of another server's setting; None if no server has that name.

    `settings` are the names of our settings. `write` formats one of them like `name`, such as a
    flag.
    """
    found = _find(name, settings)
    return f"here it is {' or '.join(map(write, found))}" if isinstance(found, tuple) else found


def settings_for(variable: str, settings: Container[str]) -> str | None:
    """Return our settings for another server's environment variable; None for other variables."""
    name = variable.lower()
    is_theirs = name.startswith(_PREFIXES) or name in _TEI or name in _VLLM
    found = _find(name, settings) if is_theirs and variable not in _SYSTEM_VARIABLES else None
    return " or ".join(map(str.upper, found)) if isinstance(found, tuple) else None
