"""What can go wrong, in the product's own words. Knows nothing of HTTP and imports nothing."""


class SmartEmbedderError(Exception):
    """The root of every error raised on purpose; its text is one sentence for the user.

    `code` is a stable word for programs. `retry_after` is the seconds after which another try makes
    sense, where that can be told.
    """

    code = "internal_error"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StartupError(SmartEmbedderError):
    """The service cannot start; the message says why and what to do."""

    code = "startup_failed"


class EmptyInputError(SmartEmbedderError):
    """There is nothing to work on."""

    code = "empty_input"


class InvalidRequestError(SmartEmbedderError):
    """The request is not of the form that the API describes.

    `problems` lists the places, each as `{"pointer": "/sentences/0", "message": "..."}`; it never
    holds the caller's texts.
    """

    code = "invalid_request"

    def __init__(self, message: str, problems: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or []


class UnauthorizedError(SmartEmbedderError):
    """The request shows no token that opens the service."""

    code = "unauthorized"


class RateLimitedError(SmartEmbedderError):
    """The client has sent more requests than its share."""

    code = "rate_limited"


class BodyTooLargeError(SmartEmbedderError):
    """The request body is larger than MAX_BODY_BYTES."""

    code = "body_too_large"


class UnsupportedMediaError(SmartEmbedderError):
    """The request body is not declared as JSON in UTF-8, or is compressed."""

    code = "unsupported_media_type"


class ForeignOriginError(SmartEmbedderError):
    """A web page of another origin asks, and CORS_ORIGINS does not name it."""

    code = "foreign_origin"


class BodyStalledError(SmartEmbedderError):
    """The request body comes too slowly, or not at all."""

    code = "request_timeout"


class ClientGoneError(SmartEmbedderError):
    """The client left before its request was complete or answered."""

    code = "client_gone"


class UnavailableError(SmartEmbedderError):
    """The service cannot take this request now; another try later may succeed."""

    code = "unavailable"


class LoadingError(UnavailableError):
    """The models are still being loaded."""

    code = "loading"


class DrainingError(UnavailableError):
    """The service is shutting down and answers only what it has accepted."""

    code = "draining"


class UnhealthyError(UnavailableError):
    """The service could not start or cannot go on."""

    code = "unhealthy"


class QueueFullError(UnavailableError):
    """Every place in the queue stayed taken for as long as the caller may wait."""

    code = "queue_full"


class RerankerDisabledError(UnavailableError):
    """Reranking is asked for, and the settings switch it off."""

    code = "reranker_disabled"


class OutOfMemoryError(UnavailableError):
    """The device has too little memory for this work."""

    code = "out_of_memory"


class InferenceError(SmartEmbedderError):
    """The model failed on a batch; the cause is chained and logged."""

    code = "inference_failed"


class InferenceTimeoutError(SmartEmbedderError):
    """One forward pass, or the whole request, took longer than it may."""

    code = "timeout"
