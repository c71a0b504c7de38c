"""How many tokens a text has for the service, which is asked for each word once."""

from collections.abc import Callable, Iterable, Sequence

CountTokens = Callable[[Sequence[str]], Sequence[int]]

_TEXTS_PER_REQUEST, _CHARACTERS_PER_REQUEST = 128, 500_000
_LONGEST_PIECE = 10_000
# About 5 MB. Texts full of numbers have new words without end.
_REMEMBERED_WORDS, _REMEMBERED_CHARACTERS = 30_000, 1_000_000


class StoppedError(Exception):
    """The run has ended, so that nobody waits for what is counted or split."""


class TokenCounter:
    """Counts as the tokenizers of bge-m3 and BERT do, which never join words at white space.

    So the tokens of a text are those of its words, and the service is asked for the words that it
    has not counted yet. Special tokens are left out.

    Args:
        count: Asks the service for the number of tokens of each text.
    """

    def __init__(self, count: CountTokens) -> None:
        self._count = count
        self._known: dict[str, int] = {}
        self._characters = 0
        self._stopped = False

    def stop(self) -> None:
        """Have what counts in another thread raise StoppedError."""
        self._stopped = True

    def prepare(self, texts: Iterable[str]) -> None:
        """Count the words of many texts, in few requests."""
        if len(self._known) > _REMEMBERED_WORDS or self._characters > _REMEMBERED_CHARACTERS:
            self._known.clear()
            self._characters = 0
        words = {piece: None for text in texts for piece in _pieces(text)}
        self._learn([word for word in words if word not in self._known])

    def count(self, text: str) -> int:
        """The number of tokens of one text."""
        if self._stopped:
            raise StoppedError
        pieces = _pieces(text)
        unknown = list(dict.fromkeys(piece for piece in pieces if piece not in self._known))
        if unknown:
            self._learn(unknown)
        return sum(self._known[piece] for piece in pieces)

    def _learn(self, words: Sequence[str]) -> None:
        for request in _requests(words):
            if self._stopped:
                raise StoppedError
            self._known.update(zip(request, self._count(request), strict=True))
            self._characters += sum(map(len, request))


def _pieces(text: str) -> list[str]:
    """Its words; what is written without spaces is cut, far above the length of words."""
    return [
        word[start : start + _LONGEST_PIECE]
        for word in text.split()
        for start in range(0, len(word), _LONGEST_PIECE)
    ]


def _requests(words: Sequence[str]) -> Iterable[Sequence[str]]:
    request: list[str] = []
    characters = 0
    for word in words:
        if len(request) == _TEXTS_PER_REQUEST or characters > _CHARACTERS_PER_REQUEST:
            yield request
            request, characters = [], 0
        request.append(word)
        characters += len(word)
    if request:
        yield request
