"""bge-m3 with its heads as an OpenVINO model, in floating point or quantized to 8 bits by NNCF.

    python -m benchmarks.adapters.openvino_models FOLDER {float,int8}

The model is saved beside the checkpoint, in FOLDER-openvino.
"""

import argparse
import shutil
from pathlib import Path
from tempfile import mkdtemp

import nncf
import numpy as np
import openvino
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import XLMRobertaModel

from benchmarks.adapters.openvino import model_file
from benchmarks.workload import MIXED, draw_texts

_CALIBRATION_TEXTS, _CALIBRATION_TOKENS = 24, 256
# Another seed than the benchmarks', so that calibration does not see the measured texts.
_CALIBRATION_SEED = 7


class DenseSparseColbert(nn.Module):
    """The encoder and both heads: dense [N, width], sparse [N, L], ColBERT [N, L - 1, width]."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.encoder = XLMRobertaModel.from_pretrained(folder, add_pooling_layer=False).eval()
        self.sparse = _head(folder / "sparse_linear.pt")
        self.colbert = _head(folder / "colbert_linear.pt")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute all outputs for ids and mask [N, L]; outputs at padding are to be ignored."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        sparse = torch.relu(self.sparse(states))[..., 0]
        colbert = normalize(self.colbert(states[:, 1:]), dim=-1)
        return normalize(states[:, 0], dim=-1), sparse, colbert


def _head(file: Path) -> nn.Linear:
    weights = torch.load(file, weights_only=True)
    width, hidden = weights["weight"].shape
    head = nn.Linear(hidden, width)
    head.load_state_dict(weights)
    return head


def convert(folder: Path) -> openvino.Model:
    """Convert the checkpoint to a model for batches of any size and length."""
    ids = torch.randint(5, 1000, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    example = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        return openvino.convert_model(DenseSparseColbert(folder), example_input=example)


def quantize(folder: Path) -> openvino.Model:
    """Quantize weights and activations to 8 bits with NNCF's preset for transformers."""
    if not model_file(folder, "float").exists():
        save_model(folder, "float")
    model = openvino.Core().read_model(model_file(folder, "float"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = draw_texts(MIXED, _CALIBRATION_TEXTS, seed=_CALIBRATION_SEED)
    rows = [tokenizer.encode(text).ids[:_CALIBRATION_TOKENS] for text in texts]
    ids = [np.array([row], np.int64) for row in rows]
    samples = [{"input_ids": row, "attention_mask": np.ones_like(row)} for row in ids]
    return nncf.quantize(
        model,
        nncf.Dataset(samples),
        subset_size=len(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
    )


def save_model(folder: Path, kind: str) -> None:
    """Save the model completely or not at all."""
    target = model_file(folder, kind).parent
    target.parent.mkdir(exist_ok=True)
    unfinished = Path(mkdtemp(prefix=".", dir=target.parent))
    model = convert(folder) if kind == "float" else quantize(folder)
    openvino.save_model(model, unfinished / "model.xml")
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def main() -> None:
    """Save the model that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=["float", "int8"])
    arguments = parser.parse_args()
    save_model(arguments.folder, arguments.kind)


if __name__ == "__main__":
    main()
