"""Text that somebody else wrote, made fit for a line of a log or of an error."""

LONGEST = 200


def printable(text: str, longest: int = LONGEST) -> str:
    """The first `longest` characters, with everything that is no plain print escaped.

    That is what could end a line, move a terminal's cursor, or turn the direction of writing.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text[:longest]
    )
