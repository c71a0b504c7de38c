"""OpenVINO on the CPU: the converted model, or the one quantized to 8 bits by NNCF."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from tokenizers import Tokenizer

from benchmarks.adapters import Setting, Vectors, batch_by_length

PACKAGE = "openvino"
_DEFAULT_BATCH = 1
_PAD, _SPECIAL = 1, 4

# The dense vector, sparse weights and ColBERT vectors of one text.
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


class Adapter:
    """Texts of similar length are padded together.

    With the hint `throughput` OpenVINO runs several forwards at once; otherwise one forward has all
    cores.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        # A limited oneDNN (see LIMITS of the worker) would emulate bfloat16.
        limited = precision == "float32" or "ONEDNN_MAX_CPU_ISA" in os.environ
        self._precision = "f32" if limited else "bf16"
        self._file = _existing_model(folder, "int8" if precision == "int8" else "float")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(8192)
        self._hint = ""
        self._forwards: openvino.AsyncInferQueue | None = None

    def encode(self, texts: list[str], setting: Setting) -> list[Parts]:
        """Compute the three kinds of each text."""
        forwards = self._compile(setting.hint or "latency")
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        parts: dict[int, Parts] = {}
        forwards.set_callback(lambda request, batch: parts.update(_split(request, batch)))
        for indices in batch_by_length(texts, setting.batch or _DEFAULT_BATCH):
            batch = {index: np.array(ids[index], np.int64) for index in indices}
            padded = np.full((len(batch), max(map(len, batch.values()))), _PAD, np.int64)
            for row, text_ids in enumerate(batch.values()):
                padded[row, : len(text_ids)] = text_ids
            mask = (padded != _PAD).astype(np.int64)
            forwards.start_async({"input_ids": padded, "attention_mask": mask}, batch)
        forwards.wait_all()
        return [parts[index] for index in range(len(texts))]

    def _compile(self, hint: str) -> openvino.AsyncInferQueue:
        if self._forwards is None or hint != self._hint:
            options = {
                "INFERENCE_PRECISION_HINT": self._precision,
                "PERFORMANCE_HINT": hint.upper(),
            }
            model = openvino.Core().compile_model(self._file, "CPU", options)
            self._forwards, self._hint = openvino.AsyncInferQueue(model), hint
        return self._forwards

    def vectors(self, output: list[Parts]) -> Vectors:
        """Join the arrays of the texts."""
        dense, _, colbert = zip(*output, strict=True)
        return Vectors(dense=np.stack(dense), colbert=np.concatenate(colbert))


def model_file(folder: Path, kind: str) -> Path:
    """Return the path of the model of a kind, `float` or `int8`."""
    return folder.parent / f"{folder.name}-openvino" / kind / "model.xml"


def _existing_model(folder: Path, kind: str) -> Path:
    """Return the path of the model; convert it first if it is missing or older than the checkpoint.

    Another process converts it, so that its memory does not count as the engine's.
    """
    file = model_file(folder, kind)
    if not file.exists() or file.stat().st_mtime < (folder / "config.json").stat().st_mtime:
        converter = "benchmarks.adapters.openvino_models"
        subprocess.run([sys.executable, "-m", converter, str(folder), kind], check=True)
    return file


def _split(request: Any, batch: dict[int, np.ndarray]) -> dict[int, Parts]:
    """Copy each text's part of the outputs, without padding; return the parts by index."""
    dense, sparse, colbert = (request.get_output_tensor(i).data for i in range(3))
    return {
        index: (
            dense[row].copy(),
            np.where(ids >= _SPECIAL, sparse[row, : len(ids)], 0),
            colbert[row, : len(ids) - 1].copy(),
        )
        for row, (index, ids) in enumerate(batch.items())
    }
