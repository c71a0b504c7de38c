"""Calls a kernel wrongly, which has to end this process, for scripts/check_sanitizers.sh.

python -m tests.support.kernel_faults address|undefined
"""

import sys

import torch

from tests.support.native import LIBRARIES

FLOAT32 = 0
SILU = 3


def main(fault: str) -> None:
    states, output = torch.zeros(2, 64), torch.zeros(2, 32)
    addresses = states.data_ptr(), output.data_ptr()
    library = LIBRARIES[0]
    # A call within the memory is no fault.
    library.run("gate", *addresses, FLOAT32, 2, 32, SILU)
    if fault == "address":
        library.run("gate", *addresses, FLOAT32, 3, 32, SILU)
    else:
        shape = 2**63 - 1, 16, 64, 64
        left_and_right, no_bytes = addresses[:1] * 2, (None,) * 4
        formats = FLOAT32, FLOAT32
        library.run("gemm", *left_and_right, *no_bytes, *addresses, *formats, *shape, 0)


if __name__ == "__main__":
    main(sys.argv[1])
