"""The exceptions of a run; their messages are one sentence."""


class IngestError(Exception):
    """The run cannot start or continue."""


class UnreadableError(Exception):
    """A file cannot be read; the message follows its name."""
