"""The errors of the engine. This module knows no HTTP and imports nothing."""

LONGEST_RETRY_AFTER = 30
# Characters that are kept at either end of a long message of a `StartupError`.
_KEPT_CHARACTERS = 1000


def printable(text: str) -> str:
    """Escape characters that could end a line, move the cursor, or change the text direction."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


class SmartEmbedderError(Exception):
    """The base class of all errors that the engine raises; the message is a sentence for users.

    `code` is a stable word for programs. `retry_after` is the number of seconds after which a retry
    may succeed, or None if that is unknown.
    """

    code = "internal_error"

    def __init_subclass__(cls, code: str | None = None) -> None:
        """Set the code of a subclass; without one, it has the code of its base class."""
        if code is not None:
            cls.code = code

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StartupError(SmartEmbedderError, code="startup_failed"):
    """The service cannot start; the message says why and what to do.

    The message may quote the files of a model, so it is made printable, and the middle of a very
    long one is left out.
    """

    def __init__(self, message: str) -> None:
        if len(message) > 2 * _KEPT_CHARACTERS:
            message = f"{message[:_KEPT_CHARACTERS]} ... {message[-_KEPT_CHARACTERS:]}"
        super().__init__(printable(message))


class EmptyInputError(SmartEmbedderError, code="empty_input"):
    """The request has no text."""


class InvalidRequestError(SmartEmbedderError, code="invalid_request"):
    """The request does not match the description of the API.

    `problems` are dicts such as `{"pointer": "/sentences/0", "message": "..."}`, which never
    contain texts of the client.
    """

    def __init__(self, message: str, problems: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or []


class KindNotMadeError(InvalidRequestError, code="kind_not_made"):
    """The request asks for a kind of vectors that no model computes."""


class TextTooLongError(InvalidRequestError, code="text_too_long"):
    """A text has more tokens than the model's limit, and `truncate` is False."""


class VectorSpaceDiffersError(SmartEmbedderError, code="vector_space_differs"):
    """The vectors of the response would be in another vector space than the request names."""


class UnavailableError(SmartEmbedderError, code="unavailable"):
    """The service cannot serve the request now; a retry may succeed.

    `retry_after` is at most `LONGEST_RETRY_AFTER`, because some clients do not retry after more.
    """

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        seconds = None if retry_after is None else min(retry_after, LONGEST_RETRY_AFTER)
        super().__init__(message, retry_after=seconds)


class LoadingError(UnavailableError, code="loading"):
    """The models are still being loaded."""


class MemoryTakenError(LoadingError):
    """Other programs use the memory that a model of MODELS needs; it may fit later."""


class ModelNotLoadedError(UnavailableError, code="model_not_loaded"):
    """A model of MODELS could not be loaded; the log says why."""


class ModelTooLargeError(UnavailableError, code="model_too_large"):
    """A model of MODELS does not fit into the memory; waiting does not help."""


class DrainingError(UnavailableError, code="draining"):
    """The service is shutting down and finishes only accepted requests."""


class UnhealthyError(UnavailableError, code="unhealthy"):
    """The service could not start, or cannot serve any more."""


class DeviceFailedError(UnhealthyError):
    """A device has failed permanently and is out of service; the cause is chained."""


class DeviceCrashedError(DeviceFailedError, code="inference_failed"):
    """A device has failed permanently, perhaps because of its batch, which is not handed over."""


class QueueFullError(UnavailableError, code="queue_full"):
    """No permit became free in the time that a request may wait, or the memory is in use."""


class RerankerDisabledError(UnavailableError, code="reranker_disabled"):
    """The settings switch reranking off."""


class OutOfMemoryError(UnavailableError, code="out_of_memory"):
    """There is too little memory for this work."""


class InferenceError(SmartEmbedderError, code="inference_failed"):
    """The model failed on a batch; the cause is chained and logged."""


class InferenceTimeoutError(SmartEmbedderError, code="timeout"):
    """One forward pass, or the whole request, exceeded its time limit."""
