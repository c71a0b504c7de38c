"""OpenVINO on the CPU: the converted model in bfloat16, or the one that NNCF quantized."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from tokenizers import Tokenizer

from benchmarks.adapters import Setting, Vectors, by_length

PACKAGE = "openvino"
_DEFAULT_BATCH = 1
_PAD, _SPECIAL = 1, 4

# The dense vector, sparse weights and ColBERT vectors of one text.
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


class Adapter:
    """Texts of near-equal length are padded together.

    The hint `throughput` runs as many forwards at once as OpenVINO finds best; otherwise one
    forward has all cores.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        # A limited oneDNN (see LIMITS of the worker) has no bfloat16, and would emulate it.
        limited = precision == "float32" or "ONEDNN_MAX_CPU_ISA" in os.environ
        self._precision = "f32" if limited else "bf16"
        self._file = _existing_model(folder, "int8" if precision == "int8" else "float")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(8192)
        self._hint = ""
        self._forwards: openvino.AsyncInferQueue | None = None

    def encode(self, texts: list[str], setting: Setting) -> list[Parts]:
        """The three kinds of every text, as arrays."""
        forwards = self._compiled(setting.hint or "latency")
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        found: dict[int, Parts] = {}
        forwards.set_callback(lambda request, batch: found.update(_split(request, batch)))
        for places in by_length(texts, setting.batch or _DEFAULT_BATCH):
            batch = {place: np.array(ids[place], np.int64) for place in places}
            padded = np.full((len(batch), max(map(len, batch.values()))), _PAD, np.int64)
            for row, each in enumerate(batch.values()):
                padded[row, : len(each)] = each
            mask = (padded != _PAD).astype(np.int64)
            forwards.start_async({"input_ids": padded, "attention_mask": mask}, batch)
        forwards.wait_all()
        return [found[place] for place in range(len(texts))]

    def _compiled(self, hint: str) -> openvino.AsyncInferQueue:
        if self._forwards is None or hint != self._hint:
            options = {
                "INFERENCE_PRECISION_HINT": self._precision,
                "PERFORMANCE_HINT": hint.upper(),
            }
            model = openvino.Core().compile_model(self._file, "CPU", options)
            self._forwards, self._hint = openvino.AsyncInferQueue(model), hint
        return self._forwards

    def vectors(self, answer: list[Parts]) -> Vectors:
        """The arrays, joined."""
        dense, _, colbert = zip(*answer, strict=True)
        return Vectors(dense=np.stack(dense), colbert=np.concatenate(colbert))


def model_file(folder: Path, kind: str) -> Path:
    """The model of that kind, `float` or `int8`, whether it exists or not."""
    return folder.parent / f"{folder.name}-openvino" / kind / "model.xml"


def _existing_model(folder: Path, kind: str) -> Path:
    """The model, made now if there is none or the checkpoint is newer.

    Another process makes it, so that its memory does not count as that of the engine.
    """
    file = model_file(folder, kind)
    if not file.exists() or file.stat().st_mtime < (folder / "config.json").stat().st_mtime:
        maker = "benchmarks.adapters.openvino_models"
        subprocess.run([sys.executable, "-m", maker, str(folder), kind], check=True)
    return file


def _split(request: Any, batch: dict[int, np.ndarray]) -> dict[int, Parts]:
    """Copies of each text's own part of the outputs, without padding, by place."""
    dense, sparse, colbert = (request.get_output_tensor(i).data for i in range(3))
    return {
        place: (
            dense[row].copy(),
            np.where(ids >= _SPECIAL, sparse[row, : len(ids)], 0),
            colbert[row, : len(ids) - 1].copy(),
        )
        for row, (place, ids) in enumerate(batch.items())
    }
