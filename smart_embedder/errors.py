"""The errors of the service. Knows nothing of HTTP and imports nothing."""

LONGEST_RETRY_AFTER = 30
# Characters at either end of a long message of a start.
_ENDS = 1000


def printable(text: str) -> str:
    """The text with escapes for what could end a line, move a cursor, or turn the writing."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


class SmartEmbedderError(Exception):
    """The base of every error raised on purpose; its text is one sentence for the user.

    `code` is a stable word for programs. `retry_after` is the number of seconds after which another
    try may succeed, if that is known.
    """

    code = "internal_error"

    def __init_subclass__(cls, code: str | None = None) -> None:
        """Give a kind of error its code; without one it has that of its base."""
        if code is not None:
            cls.code = code

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StartupError(SmartEmbedderError, code="startup_failed"):
    """The service cannot start; the message says why and what to do.

    It may quote the files of a model: it is made printable, and a very long one loses its middle.
    """

    def __init__(self, message: str) -> None:
        if len(message) > 2 * _ENDS:
            message = f"{message[:_ENDS]} ... {message[-_ENDS:]}"
        super().__init__(printable(message))


class EmptyInputError(SmartEmbedderError, code="empty_input"):
    """The request holds no text to work on."""


class InvalidRequestError(SmartEmbedderError, code="invalid_request"):
    """The request does not match the API's description.

    `problems` lists the places, each as `{"pointer": "/sentences/0", "message": "..."}`; it never
    holds the client's texts.
    """

    def __init__(self, message: str, problems: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or []


class KindNotMadeError(InvalidRequestError, code="kind_not_made"):
    """The request asks for a kind of vectors that no model here makes."""


class TextTooLongError(InvalidRequestError, code="text_too_long"):
    """A text has more tokens than its model reads, and the request does not allow cutting it."""


class VectorSpaceDiffersError(SmartEmbedderError, code="vector_space_differs"):
    """The request names a vector space, and its vectors would be of another one."""


class UnavailableError(SmartEmbedderError, code="unavailable"):
    """The service cannot take this request now; a later try may succeed.

    At most `LONGEST_RETRY_AFTER` is told: a client that is told to wait longer does not try again.
    """

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        seconds = None if retry_after is None else min(retry_after, LONGEST_RETRY_AFTER)
        super().__init__(message, retry_after=seconds)


class LoadingError(UnavailableError, code="loading"):
    """The models are still being loaded."""


class MemoryTakenError(LoadingError):
    """Other programs hold the memory that a model of MODELS needs, which may fit later."""


class ModelNotLoadedError(UnavailableError, code="model_not_loaded"):
    """A model of MODELS could not be loaded; the log says why."""


class ModelTooLargeError(UnavailableError, code="model_too_large"):
    """A model of MODELS does not fit the memory beside those that stay; waiting does not help."""


class DrainingError(UnavailableError, code="draining"):
    """The service is shutting down and finishes only accepted requests."""


class UnhealthyError(UnavailableError, code="unhealthy"):
    """The service could not start or cannot go on."""


class DeviceFailedError(UnhealthyError):
    """A device has failed for good, which takes it out of service; the cause is chained."""


class DeviceCrashedError(DeviceFailedError, code="inference_failed"):
    """A device has failed for good at what it computed, which is given to no other."""


class QueueFullError(UnavailableError, code="queue_full"):
    """The queue stayed full for as long as a request may wait for a place."""


class RerankerDisabledError(UnavailableError, code="reranker_disabled"):
    """The settings switch reranking off."""


class OutOfMemoryError(UnavailableError, code="out_of_memory"):
    """There is too little memory for this work."""


class InferenceError(SmartEmbedderError, code="inference_failed"):
    """The model failed on a batch; the cause is chained and logged."""


class InferenceTimeoutError(SmartEmbedderError, code="timeout"):
    """One forward pass, or the whole request, exceeded its time limit."""
