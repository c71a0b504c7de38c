"""`python -m app` is `python -m smart_embedder`."""

from smart_embedder.__main__ import main

if __name__ == "__main__":
    main()
