"""Runs in the clients' own environment: an example of docs/clients.md, several times.

Reads `{"code": ..., "runs": [{"replace": {old: new}, "texts": [...]}]}` and prints, for each run,
what the example left in `vectors` or `scores`, or the error that its user would see.
"""

import contextlib
import json
import sys


def run(code: str, texts: list[str], replace: dict[str, str]) -> dict:
    for old, new in replace.items():
        code = code.replace(old, new)
    found = {"texts": texts, "query": texts[0]}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(code, found)
    except Exception as error:  # noqa: BLE001 - whatever the client raises is the result
        return {"error": type(error).__name__, "message": str(error)[:1000]}
    if "vectors" in found:
        return {"vectors": [[float(number) for number in vector] for vector in found["vectors"]]}
    if "similarities" in found:
        return {"similarities": [float(score) for score in found["similarities"]]}
    return {"scores": [[text, float(score)] for text, score in found["scores"]]}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.stdout.write(json.dumps([run(request["code"], **each) for each in request["runs"]]))
