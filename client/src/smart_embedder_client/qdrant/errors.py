"""What can go wrong with Qdrant; every message is one sentence."""


class QdrantError(Exception):
    """Qdrant cannot do what is asked, now or later."""


class QdrantRefusedError(QdrantError):
    """A point of the request is refused; the others may pass without it."""


class QdrantBusyError(QdrantError):
    """Qdrant cannot be reached or is busy: the same request may pass later.

    Attributes:
        retry_after: Seconds after which it may; None if Qdrant does not say.
    """

    def __init__(self, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class QdrantFullError(QdrantError):
    """Qdrant has no space left."""
