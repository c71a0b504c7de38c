"""The errors of the service. Knows nothing of HTTP and imports nothing."""

LONGEST_RETRY_AFTER = 30


class SmartEmbedderError(Exception):
    """The base of every error raised on purpose; its text is one sentence for the user.

    `code` is a stable word for programs. `retry_after` is the number of seconds after which another
    try may succeed, if that is known.
    """

    code = "internal_error"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StartupError(SmartEmbedderError):
    """The service cannot start; the message says why and what to do."""

    code = "startup_failed"


class EmptyInputError(SmartEmbedderError):
    """The request holds no text to work on."""

    code = "empty_input"


class InvalidRequestError(SmartEmbedderError):
    """The request does not match the API's description.

    `problems` lists the places, each as `{"pointer": "/sentences/0", "message": "..."}`; it never
    holds the client's texts.
    """

    code = "invalid_request"

    def __init__(self, message: str, problems: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or []


class UnknownModelError(SmartEmbedderError):
    """The request names a model that is not served, or not for this kind of work."""

    code = "model_not_found"


class KindNotMadeError(InvalidRequestError):
    """The request asks for a kind of vectors that no model here makes."""

    code = "kind_not_made"


class TextTooLongError(InvalidRequestError):
    """A text has more tokens than its model reads, and the request does not allow cutting it."""

    code = "text_too_long"


class UnauthorizedError(SmartEmbedderError):
    """The request has no valid token."""

    code = "unauthorized"


class RateLimitedError(SmartEmbedderError):
    """The client has exceeded its rate limit."""

    code = "rate_limited"


class BodyTooLargeError(SmartEmbedderError):
    """The request body is larger than MAX_BODY_BYTES."""

    code = "body_too_large"


class UnsupportedMediaError(SmartEmbedderError):
    """The request body is not declared as JSON in UTF-8, or it is compressed."""

    code = "unsupported_media_type"


class ForeignOriginError(SmartEmbedderError):
    """The request comes from a web page of an origin that CORS_ORIGINS does not name."""

    code = "foreign_origin"


class NotOperatorError(SmartEmbedderError):
    """The request is a command, and its token is not the operator's."""

    code = "not_operator"


class BodyStalledError(SmartEmbedderError):
    """The request body arrives too slowly, or not at all."""

    code = "request_timeout"


class AnswerNotTakenError(SmartEmbedderError):
    """The client of a stream goes on sending and does not read the answer."""

    code = "answer_not_taken"


class ClientGoneError(SmartEmbedderError):
    """The client disconnected before its request was complete or answered."""

    code = "client_gone"


class UnavailableError(SmartEmbedderError):
    """The service cannot take this request now; a later try may succeed.

    At most `LONGEST_RETRY_AFTER` is told: a client that is told to wait longer does not try again.
    """

    code = "unavailable"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        seconds = None if retry_after is None else min(retry_after, LONGEST_RETRY_AFTER)
        super().__init__(message, retry_after=seconds)


class LoadingError(UnavailableError):
    """The models are still being loaded."""

    code = "loading"


class MemoryTakenError(LoadingError):
    """Other programs hold the memory that a model of MODELS needs, which may fit later."""


class ModelNotLoadedError(UnavailableError):
    """A model of MODELS could not be loaded; the log says why."""

    code = "model_not_loaded"


class ModelTooLargeError(UnavailableError):
    """A model of MODELS does not fit the memory beside those that stay; waiting does not help."""

    code = "model_too_large"


class DrainingError(UnavailableError):
    """The service is shutting down and finishes only accepted requests."""

    code = "draining"


class UnhealthyError(UnavailableError):
    """The service could not start or cannot go on."""

    code = "unhealthy"


class DeviceFailedError(UnhealthyError):
    """A device has failed for good, which takes it out of service; the cause is chained."""


class DeviceCrashedError(DeviceFailedError):
    """A device has failed for good at what it computed, which is given to no other."""

    code = "inference_failed"


class QueueFullError(UnavailableError):
    """The queue stayed full for as long as a request may wait for a place."""

    code = "queue_full"


class RerankerDisabledError(UnavailableError):
    """The settings switch reranking off."""

    code = "reranker_disabled"


class OutOfMemoryError(UnavailableError):
    """There is too little memory for this work."""

    code = "out_of_memory"


class InferenceError(SmartEmbedderError):
    """The model failed on a batch; the cause is chained and logged."""

    code = "inference_failed"


class InferenceTimeoutError(SmartEmbedderError):
    """One forward pass, or the whole request, exceeded its time limit."""

    code = "timeout"
