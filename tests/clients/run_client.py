"""Runs examples of docs/other-clients.md in the clients' own environment: one for each line read.

A line is `{"code": ..., "texts": [...]}`. The line that answers it holds what the example left in
`vectors` or `scores`, or the error that its user would see.
"""

import contextlib
import json
import sys


def run(code: str, texts: list) -> dict:
    found = {"texts": texts, "query": texts[0]}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(code, found)
    except Exception as error:  # noqa: BLE001 - whatever the client raises is the result
        return {"error": type(error).__name__, "message": str(error)[:1000]}
    if "vectors" in found:
        return {"vectors": [as_json(vector) for vector in found["vectors"]]}
    return {"scores": [[text, float(score)] for text, score in found["scores"]]}


def as_json(vector) -> str | list[float]:
    """Return a vector in base64 unchanged, else as a list."""
    return vector if isinstance(vector, str) else [float(number) for number in vector]


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(**json.loads(line))) + "\n")
        sys.stdout.flush()
