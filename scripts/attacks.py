"""Measure what attacks cost other clients, and how much memory they take.

    python -m scripts.attacks --only "64 bodies"

Starts the service with a tiny model and the default limits. Prints for each attack the statuses,
the longest /health during the attack and the peak memory. The tests run the same attacks.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.faults.attacks import LONG, attacks, observe, save_model
from tests.support.server import run_server


def main(arguments: list[str] | None = None) -> int:
    """Run the attacks whose name contains `--only`, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only attacks whose name contains this text")
    only = parser.parse_args(arguments).only
    print(f"{'Attack':30} {'/health ms':>10} {'Peak MiB':>9} {'Allowed':>8}  Statuses")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with run_server(folder, EMBEDDING_MODEL=str(save_model(folder / "m3"))) as server:
            with server.client() as client:
                body = {"sentences": [LONG], "return_colbert": False}
                client.post("/embeddings/", json=body).raise_for_status()
            for attack in attacks():
                if only not in attack.name:
                    continue
                seen = observe(server, attack)
                failed |= not attack.allows(seen)
                mark = "" if attack.allows(seen) else "  not as expected"
                print(
                    f"{attack.name:30} {seen.longest_health * 1000:10.0f} {seen.grown >> 20:9} "
                    f"{attack.most_memory >> 20:8}  {dict(seen.outcomes)}{mark}",
                    flush=True,
                )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
