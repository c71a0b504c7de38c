"""What the machine is: prints JSON."""

import argparse
import json
import os
import platform

import torch

from smart_embedder.models.device.choose import choose_device, describe_device


def main() -> None:
    """Print the figures."""
    argparse.ArgumentParser(description=__doc__).parse_known_args()
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "device": describe_device(choose_device("auto")),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
