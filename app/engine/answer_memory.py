"""What the answer to a request will hold in memory, counted before it is made."""

import sys

from app.errors import InvalidRequestError

# What an answer may hold for each byte of its request's body. The texts themselves and what reading
# them takes may hold as much again.
BYTES_PER_BODY_BYTE = 10


class AnswerMemory:
    """Refuses an answer of more than `allowed` bytes; by default there is no limit.

    `size` is always that of the whole answer, as far as it is known: of token ids, of vectors, of
    what else is kept until the client has read it. What a forward needs on its device meanwhile is
    limited by the token budget. `body_bytes` are those of the body, unpacked, that have arrived.
    """

    def __init__(self, allowed: int = sys.maxsize) -> None:
        self._allowed = allowed
        self._size = 0
        self.body_bytes = 0

    @property
    def allowed(self) -> int:
        """The most bytes that the answer may hold."""
        return self._allowed

    @property
    def held(self) -> int:
        """How many bytes are held until the answer is read, the texts of the body included."""
        return self._size + self.body_bytes

    def check(self, size: int, what: str, advice: str) -> None:
        """Raise `InvalidRequestError` if `what` is too large; safe to call from any thread."""
        if size > self.allowed:
            raise InvalidRequestError(
                f"{what} need {size} bytes, and this answer may hold {self.allowed} "
                f"(MAX_ANSWER_BYTES, and {BYTES_PER_BODY_BYTE} for each byte of the body): {advice}"
            )

    def need(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes until the answer is read.

        Raises as `check`, and `QueueFullError` where other answers leave no room at present.
        """
        self.check(size, what, advice)
        self._size = max(self._size, size)

    def need_more(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes beside those that were needed before; raises as `need`."""
        self.need(self._size + size, what, advice)


UNLIMITED = AnswerMemory()
