"""Which device is taken, and what is said where a GPU cannot be used.

Only PyTorch's own answers are replaced: no machine that runs these tests has so old a driver.
"""

import pytest
import torch
from structlog.testing import capture_logs

from app.errors import StartupError
from app.models.device import choose_device

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version. Alternatively, go to: pytorch.org"
)


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


def test_a_driver_too_old_stops_the_start_where_a_gpu_is_asked_for(old_driver) -> None:
    with pytest.raises(StartupError) as caught:
        choose_device("cuda:0")
    assert str(caught.value) == (
        f"DEVICE=cuda:0 needs an NVIDIA GPU that PyTorch {torch.__version__} can use, and it sees "
        "none (The NVIDIA driver on your system is too old (found version 11040)); check "
        "nvidia-smi and the driver, or set DEVICE=cpu"
    )


def test_auto_says_why_it_passes_over_the_gpu(old_driver) -> None:
    if torch.backends.mps.is_available():
        pytest.skip("this machine has Apple's GPU")
    with capture_logs() as logs:
        assert choose_device("auto") == torch.device("cpu")
    reason = "The NVIDIA driver on your system is too old (found version 11040)"
    assert logs == [
        {"event": "no_gpu_used", "log_level": "warning", "reason": reason, "device": "cpu"}
    ]


def test_auto_says_nothing_where_the_build_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with capture_logs() as logs:
        choose_device("auto")
    assert logs == []
