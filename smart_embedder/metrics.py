"""The events of an engine, for programs that count them."""


class EngineMetrics:
    """Receives the events of an engine and ignores them; a subclass counts them.

    All methods are called on the event loop's thread. The states of an engine are read from its
    properties instead.
    """

    def tokenized(self, seconds: float) -> None:
        """The texts of one request were tokenized."""

    def waited(self, seconds: float) -> None:
        """A job waited `seconds` in the queue before its first forward."""

    def computed(self, model: str, *, texts: int, pairs: int, tokens: int, seconds: float) -> None:
        """A forward ended, which embedded `texts` and scored `pairs`."""

    def split(self) -> None:
        """A batch did not fit into memory and was divided."""

    def cached(self, hits: int, misses: int) -> None:
        """The vectors of `hits` texts were in the cache, and those of `misses` texts were not."""

    def loaded(self, model: str, *, ok: bool) -> None:
        """A model of MODELS was loaded, or failed to load."""

    def replaced(self, model: str) -> None:
        """A model of MODELS was loaded from other files than before."""

    def unloaded(self, model: str) -> None:
        """A model of MODELS was unloaded."""
