"""A fake of NVIDIA's driver library, for machines without a driver."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#include <string.h>
typedef unsigned long long flags;
int cuInit(unsigned unused) { return INIT; }
int cuDriverGetVersion(int *version) { *version = CUDA; return 0; }
int cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
// The arguments of the last kernel: their number, set by the test, and eight bytes of each.
int arguments;
unsigned char argument[16][8];
void *stream, *function;
unsigned blocks, threads;
int cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned i, unsigned j,
                   unsigned k, unsigned shared, void *on, void **from, void **extra) {
    stream = on, function = kernel, blocks = x * y * z, threads = i * j * k;
    for (int n = 0; n < arguments; n++)
        memcpy(argument[n], from[n], 8);
    return shared || extra;
}
// The beginning of the last module's code. A function's handle is its number.
unsigned char image[4];
int cuModuleLoadData(void **module, const void *code) {
    memcpy(image, code, sizeof image), *module = image;
    return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    static int functions;
    *function = (char *)0 + ++functions;
    return module == image ? 0 : 400;
}
int cuGetProcAddress_v2(const char *, void **, int, flags, int *);
int cuGetProcAddress(const char *name, void **found, int version, flags unused) {
    *found = !strcmp(name, "cuInit") ? (void *)cuInit
        : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
        : !strcmp(name, "cuDeviceGetCount") ? (void *)cuDeviceGetCount
        : !strcmp(name, "cuModuleLoadData") ? (void *)cuModuleLoadData
        : !strcmp(name, "cuModuleGetFunction") ? (void *)cuModuleGetFunction
        : !strcmp(name, "cuLaunchKernel") ? (void *)cuLaunchKernel
        : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : 0;
    return *found ? 0 : 500;
}
int cuGetProcAddress_v2(const char *name, void **found, int version, flags unused, int *status) {
    return cuGetProcAddress(name, found, version, unused);
}
"""


def install_driver(folder: Path, cuda: int, *, gpus: int = 1, init: int = 0) -> dict[str, str]:
    """Build the library; return the variable with which a program finds it before any other.

    `cuda` is the newest supported version, 1000 * major + 10 * minor; `init` is cuInit's status.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a fake of NVIDIA's driver needs a C compiler (cc)")
    definitions = [f"-DCUDA={cuda}", f"-DGPUS={gpus}", f"-DINIT={init}"]
    library = folder / "libcuda.so.1"
    # Without a soname: NVRTC would take the library for the driver in a process that has loaded it.
    subprocess.run(
        [compiler, "-shared", "-fPIC", *definitions, "-x", "c", "-", "-o", str(library)],
        input=_SOURCE,
        text=True,
        check=True,
    )
    return {"LD_LIBRARY_PATH": str(folder)}
