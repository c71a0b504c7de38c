"""What every model here has in common: a forward that is launched, and collected afterwards."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from app.jobs import Outputs, TokenIds

Result = TypeVar("Result")


class DeviceModel(ABC, Generic[Result]):
    """The part of `app.jobs.Model` that touches the device."""

    def settle(self) -> None:
        """Implement `app.jobs.Model`: results are the same before and after."""

    @abstractmethod
    def launch(self, sequences: list[TokenIds], outputs: Outputs) -> Callable[[], list[Result]]:
        """Begin one forward for all sequences, with every kind in `outputs`.

        What is returned waits for it, in any thread, and gives one result for each sequence, in
        order. It raises `InferenceError` where one is not a finite number.
        """

    def forward(self, sequences: list[TokenIds], outputs: Outputs) -> list[Result]:
        """Launch, and wait."""
        return self.launch(sequences, outputs)()
