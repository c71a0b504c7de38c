"""The engines that can be compared, and what each is tried with."""

from dataclasses import dataclass

from benchmarks.adapters.interface import Setting
from benchmarks.workload import Workload

OWN = "own"
_BATCHES = (1, 4, 8, 32)
_DEFAULTS = (Setting(),)
_BATCHED = tuple(Setting(batch) for batch in _BATCHES)
_OPENVINO = tuple(Setting(b, hint) for hint in ("latency", "throughput") for b in _BATCHES)


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table.

    `environment` names the requirements file of its packages, or is this project's own. The
    fastest of `settings` is found before the rounds. A `slow` one has a single round.
    """

    adapter: str
    precision: str
    settings: tuple[Setting, ...] = _BATCHED
    environment: str = "peers"
    dense_only: bool = False
    slow: bool = False

    def settings_for(self, workload: Workload, texts: int) -> list[Setting]:
        """Those whose batches that many texts of the workload can fill; at least one."""
        largest = min(workload.largest_batch, texts)
        fitting = [each for each in self.settings if (each.batch or 1) <= largest]
        return [each for each in fitting if not (workload.one_at_a_time and _parallel(each))]


def _parallel(setting: Setting) -> bool:
    return setting.hint == "throughput"


def _own(precision: str) -> Contender:
    return Contender("smart_embedder", precision, _DEFAULTS, OWN)


CATALOGUE = {
    "smart-embedder-float32": _own("float32"),
    "smart-embedder-bfloat16": _own("bfloat16"),
    "smart-embedder-int8": _own("int8"),
    "flagembedding-defaults": Contender("flag_embedding", "float32", _DEFAULTS, slow=True),
    "flagembedding": Contender("flag_embedding", "float32"),
    "m3serve-defaults": Contender("m3serve", "float32", _DEFAULTS, slow=True),
    "m3serve": Contender("m3serve", "float32"),
    "sentence-transformers-float32": Contender("sentence_transformers", "float32", dense_only=True),
    "sentence-transformers-bfloat16": Contender(
        "sentence_transformers", "bfloat16", dense_only=True
    ),
    "infinity-float32": Contender("infinity", "float32", environment="infinity", dense_only=True),
    "openvino-bfloat16": Contender("openvino", "bfloat16", _OPENVINO),
    "openvino-int8": Contender("openvino", "int8", _OPENVINO),
}
# The ratios are to the faster of these.
REFERENCES = ("flagembedding", "flagembedding-defaults")
# The cosines are to the first of these that ran.
EXACT = ("flagembedding", "flagembedding-defaults", "smart-embedder-float32")
