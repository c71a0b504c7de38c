"""`python slim_packages.py FOLDER`: remove files from installed packages that no image needs.

Removes headers, tests, and the symbols of libraries, which only debuggers read: 385 of 1,016 MB on
a CPU. Files without symbols stay unchanged, because they may be in an earlier layer.
"""

import shutil
import struct
import sys
from pathlib import Path

NEEDLESS = ("torch/include", "torch/test", "nvidia/*/include", "tests")
NEEDED_PROGRAM = "torch_shm_manager"  # torch expects it at its import.
_ELF64 = b"\x7fELF\x02\x01"


def slim(folder: Path) -> None:
    """Slim every package below `folder`."""
    for pattern in NEEDLESS:
        for found in list(folder.rglob(pattern)):
            shutil.rmtree(found)
    for program in list(folder.rglob("torch/bin/*")):
        if program.is_file() and program.name != NEEDED_PROGRAM:
            program.unlink()
    for library in folder.rglob("*.so*"):
        if library.is_file() and not library.is_symlink():
            drop_symbols(library)


def drop_symbols(library: Path) -> None:
    """Truncate a 64-bit little-endian ELF file after its last segment; leave other files alone.

    That removes the section table, too, which no loader reads.
    """
    with library.open("rb") as file:
        header = bytearray(file.read(64))
        if not header.startswith(_ELF64):
            return
        segments_at, sections_at = struct.unpack_from("<QQ", header, 32)
        if sections_at == 0:
            return
        size, count = struct.unpack_from("<HH", header, 54)
        file.seek(segments_at)
        # The offset and the size of each segment in the file.
        segments = [struct.unpack_from("<8xQ16xQ", file.read(size)) for _ in range(count)]
    # Clear the offset of the section table, its number of entries and the index of their names.
    header[40:48], header[60:64] = bytes(8), bytes(4)
    with library.open("r+b") as file:
        file.write(header)
        file.truncate(max(offset + length for offset, length in segments))


if __name__ == "__main__":
    slim(Path(sys.argv[1]))
