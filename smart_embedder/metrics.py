"""The events of an engine, for a program that counts them."""


class EngineMetrics:
    """Is told what an engine does, and does nothing with it: a subclass counts.

    All methods are called on the event loop's thread. The states of an engine are read from its
    properties instead.
    """

    def tokenized(self, seconds: float) -> None:
        """The texts of one request were tokenised."""

    def waited(self, seconds: float) -> None:
        """The first forward of a job begins so long after the job was queued."""

    def computed(self, model: str, *, texts: int, pairs: int, tokens: int, seconds: float) -> None:
        """One forward has ended, which held so many texts to embed and so many pairs to score."""

    def split(self) -> None:
        """A batch is divided because it did not fit into memory."""

    def cached(self, hits: int, misses: int) -> None:
        """The vectors of `hits` texts were in the cache, and those of `misses` texts were not."""

    def loaded(self, model: str, *, ok: bool) -> None:
        """A model of MODELS was loaded, or failed to load."""

    def replaced(self, model: str) -> None:
        """A model of MODELS was loaded from other files than before."""

    def unloaded(self, model: str) -> None:
        """A model of MODELS was unloaded."""
