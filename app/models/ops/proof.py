"""Proves at the start that each operation of a backend computes what it should on this machine.

Each path of an operation (a kernel in C, a library's operator, an attention) computes a small
batch, which is compared with the reference on the same device: `TorchBackend` in float32 with eager
attention. A path that raises an error, or differs by more than its dtype explains, is refused, and
the next one is tried.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType

import structlog
import torch
from torch import Tensor

from app.engine.devices.outcome import outcome_of
from app.errors import StartupError
from app.models.ops.proof_cases import ATTENTION, CASES, Shapes, TrialInputs
from app.models.ops.torch_backend import TorchBackend

log = structlog.get_logger(__name__)

# The largest difference, as a share of the largest number; PyTorch rounds some sums in between.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# Where a value lies between two of the 255 steps of its row, either may be chosen.
_ONE_STEP = {"quantize_rows": 0.02}
_PLAIN_ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of the trial of one path of an operation.

    `difference` is the largest one, relative to the largest number. `error` is the class of an
    error that was raised, and `message` its first line.
    """

    operation: str
    path: str
    difference: float
    tolerance: float
    error: str | None = None
    message: str = ""

    @property
    def holds(self) -> bool:
        """Whether the path may be used."""
        return self.error is None and self.difference <= self.tolerance

    @property
    def reason(self) -> str:
        """Why it was refused, without the message, which may name folders of this machine."""
        if self.error is not None:
            return f"raises {self.error}"
        return f"differs by {self.difference:.1e}, allowed are {self.tolerance:.0e}"


@dataclass(frozen=True, slots=True)
class ProvenBackend:
    """A backend with a proven path for each operation, their names, and the refused ones."""

    backend: TorchBackend
    paths: dict[str, str]
    refused: tuple[Proof, ...]


class Trial:
    """Tries the paths of a backend for one model."""

    def __init__(
        self, backend: TorchBackend, shapes: Shapes, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._backend = backend
        self._shapes = shapes
        self._device = device
        self._dtype = dtype

    def prove(self, operations: Sequence[str], *, attention_named: bool = False) -> ProvenBackend:
        """Choose the first path of each operation whose proof holds.

        Raises `StartupError` if none holds, or if that of an attention that a setting names fails.
        """
        proven = copy(self._backend)
        paths: dict[str, str] = {}
        refused: list[Proof] = []
        for operation in operations:
            *before, (variant, proof) = self._until_one_holds(operation)
            failed = [each for _, each in before]
            if not proof.holds:
                raise _nothing_holds(proof)
            if failed and attention_named and operation == ATTENTION:
                raise _refused_attention(failed[0])
            warn_of_refused(failed, proof.path)
            refused += failed
            _take(proven, variant, operation)
            paths[operation] = proof.path
        return ProvenBackend(proven, paths, tuple(refused))

    def every_proof(self, operations: Sequence[str]) -> list[Proof]:
        """The proofs of all paths."""
        return [proof for each in operations for _, proof in self._proofs(each)]

    def _until_one_holds(self, operation: str) -> Iterator[tuple[TorchBackend, Proof]]:
        for variant, proof in self._proofs(operation):
            yield variant, proof
            if proof.holds:
                return

    def _proofs(self, operation: str) -> Iterator[tuple[TorchBackend, Proof]]:
        """The proof of each path; the last one is that of the plain path."""
        for path, variant in _variants(self._backend, operation):
            yield variant, self._try(operation, path, variant)

    @torch.inference_mode()
    def _try(self, operation: str, path: str, variant: TorchBackend) -> Proof:
        expected = self._compute(operation, TorchBackend("eager"), exact=True)
        compute = partial(self._compute, operation, variant, exact=False)
        tolerance = _ONE_STEP.get(operation, TOLERANCES[self._dtype])
        return try_path(operation, path, compute, expected, tolerance)

    def _compute(self, operation: str, backend: TorchBackend, *, exact: bool) -> list[Tensor]:
        limit = self._backend.int8_weight_limit
        inputs = TrialInputs(self._shapes, self._device, self._dtype, limit, exact=exact)
        return list(CASES[operation](backend, inputs))


def try_path(
    operation: str,
    path: str,
    compute: Callable[[], list[Tensor]],
    expected: list[Tensor],
    tolerance: float,
) -> Proof:
    """Compare what a path computes with the expected results; an error is part of the proof."""
    actual = outcome_of(compute)
    if isinstance(actual, Exception):
        message = next(iter(str(actual).splitlines()), "")
        return Proof(operation, path, math.inf, 0.0, type(actual).__name__, message)
    return Proof(operation, path, _difference(actual, expected), tolerance)


def _variants(backend: TorchBackend, operation: str) -> Iterator[tuple[str, TorchBackend]]:
    """The backend with each path of an operation, the fastest first."""
    if operation == ATTENTION:
        for name in dict.fromkeys((backend.attention, *_PLAIN_ATTENTIONS)):
            variant = copy(backend)
            if name != backend.attention:
                variant.attention, variant.attend = name, variant.load_attention(name)
            yield name, variant
        return
    for each in backend.implementations(operation):
        variant = copy(backend)
        setattr(variant, operation, MethodType(vars(each)[operation], variant))
        yield each.name, variant


def _take(backend: TorchBackend, variant: TorchBackend, operation: str) -> None:
    if operation == ATTENTION:
        backend.attention, backend.attend = variant.attention, variant.attend
    else:
        setattr(backend, operation, getattr(variant, operation))


def _difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(_largest_difference(mine, other) for mine, other in pairs)


def _largest_difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    # On the host: Apple's GPUs have no float64.
    mine, other = (each.cpu().double() for each in (actual, expected))
    share = float((mine - other).abs().amax() / other.abs().amax())
    # `max` would pass over what is not a number.
    return math.inf if math.isnan(share) else share


def warn_of_refused(refused: Sequence[Proof], used_instead: str) -> None:
    """One warning for each path that is not used."""
    for proof in refused:
        log.warning(
            "path_refused",
            operation=proof.operation,
            path=proof.path,
            reason=f"{proof.reason}: {proof.message}" if proof.message else proof.reason,
            used_instead=used_instead,
        )


def _refused_attention(proof: Proof) -> StartupError:
    return StartupError(
        f"ATTENTION={proof.path} does not compute what it should on this device "
        f"({proof.reason}); set ATTENTION to auto"
    )


def _nothing_holds(proof: Proof) -> StartupError:
    return StartupError(
        f"this device does not compute {proof.operation} correctly, not even by PyTorch's own "
        f"operators ({proof.reason}); choose another with DEVICE"
    )
