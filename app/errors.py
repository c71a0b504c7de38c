"""Errors of the HTTP service; the engine's are in `smart_embedder.errors`."""

from smart_embedder.errors import SmartEmbedderError


class UnknownModelError(SmartEmbedderError, code="model_not_found"):
    """The request names a model that is not served, or not for this kind of work."""


class UnauthorizedError(SmartEmbedderError, code="unauthorized"):
    """The request has no valid token."""


class RateLimitedError(SmartEmbedderError, code="rate_limited"):
    """The client has exceeded its rate limit."""


class BodyTooLargeError(SmartEmbedderError, code="body_too_large"):
    """The request body is larger than MAX_BODY_BYTES."""


class UnsupportedMediaError(SmartEmbedderError, code="unsupported_media_type"):
    """The request body is not declared as JSON in UTF-8, or it is compressed."""


class ForeignOriginError(SmartEmbedderError, code="foreign_origin"):
    """The request comes from a web page of an origin that CORS_ORIGINS does not name."""


class NotOperatorError(SmartEmbedderError, code="not_operator"):
    """The request is a command, and its token is not the operator's."""


class BodyStalledError(SmartEmbedderError, code="request_timeout"):
    """The request body arrives too slowly, or not at all."""


class ClientGoneError(SmartEmbedderError, code="client_gone"):
    """The client disconnected before its request was complete or answered."""
