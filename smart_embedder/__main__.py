"""`python -m smart_embedder` served until version 2; the service is `python -m app` now."""

import sys

if __name__ == "__main__":
    sys.exit("smart_embedder is the library: python -m app starts the service, in a checkout")
