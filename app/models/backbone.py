"""The backbone of a model: a transformer from packed token ids to hidden states."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path

import torch

from app.engine.types import TokenIds
from app.errors import StartupError
from app.models.architectures.bert import Encoder, EncoderParameters, make_encoder
from app.models.architectures.bert_config import EncoderConfig
from app.models.architectures.qwen3 import (
    DecoderConfig,
    DecoderParameters,
    make_decoder,
)
from app.models.architectures.transformer import Transformer
from app.models.attention.partly_attended import leaving_out
from app.models.batch.packing import PackedBatch, pack
from app.models.batch.selection import TokenSelection, select_tokens
from app.models.checkpoint.weights import Weights
from app.models.cuda_graphs import (
    GraphedForwards,
    GraphTrial,
    make_buckets,
)
from app.models.device.cpu_threads import CpuThreads
from app.models.ops.proof import TOLERANCES
from app.models.ops.proof_cases import (
    DECODER,
    ENCODER,
    GPU_ENCODER,
    QUANTIZED_ENCODER,
    Shapes,
)
from app.models.ops.torch_backend import can_quantize
from app.models.quantization.calibration import calibration_sequences
from app.models.quantization.encoder import make_quantized_encoder
from app.models.target import Target
from app.models.text.tokenizer import TextTokenizer

# oneDNN compiles a kernel for each number of rows, which takes milliseconds in bfloat16. Rounding
# up makes the numbers few, so that kernels are reused; added rows cost more the fewer rows there
# are. (Tokens up to, multiple.)
_CPU_MULTIPLES = ((32, 1), (512, 8))
_CPU_LARGE_MULTIPLE = 32


class Backbone:
    """A transformer that maps a packed batch to the hidden state of every token.

    `max_length` is the number of positions. RoBERTa counts positions from `padding` + 1.
    `parameters` is the number of weights that each token is multiplied with. With `reads_segments`
    the tokens of the second text of a pair must be marked.
    """

    def __init__(
        self,
        transformer: Transformer,
        target: Target,
        *,
        hidden_size: int,
        max_length: int,
        parameters: int,
        padding: int | None = None,
        reads_segments: bool = False,
    ) -> None:
        self.target = target
        self.device = target.device
        self.dtype = target.dtype
        self.backend = target.backend
        self.hidden_size = hidden_size
        self.max_length = max_length
        self.reads_segments = reads_segments
        self._transformer = transformer
        self._padding = padding
        self._graphs: GraphedForwards | None = None
        self._cpu_threads = CpuThreads(parameters, target.cpu_threads)

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes of sequences are computed once, as a causal model allows."""
        return self._transformer.shares_prefixes

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which vectors are copied to the host: as exact as the model."""
        half = self.device.type == "cuda" and self.dtype is not torch.float32
        return torch.float16 if half else torch.float32

    def pack(self, sequences: list[TokenIds]) -> PackedBatch:
        """Join token sequences as this transformer reads them."""
        return pack(
            sequences,
            device=self.device,
            roberta_padding=self._padding,
            segment_positions=self.max_length if self.reads_segments else 0,
            multiple=self._multiple(sum(map(len, sequences))),
            causal=self.shares_prefixes,
        )

    def _multiple(self, tokens: int) -> int:
        """The multiple to which this number of tokens is rounded up."""
        rounds_up = self.device.type == "cpu" and self._transformer.rounds_up
        return cpu_multiple(tokens) if rounds_up else 1

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """`[T, hidden]`: the last hidden state of every token, in the model's dtype."""
        if self.device.type == "cpu":
            self._cpu_threads.set_for(packed.tokens)
        graphs = self._graphs if packed.partly_attended is None else None
        graph = None if graphs is None else graphs.find(packed)
        return self._transformer(packed) if graph is None else graph(packed)

    def capture_graphs(self) -> None:
        """On an NVIDIA GPU, launch small batches as CUDA graphs from now on."""
        if self.device.type == "cuda" and self._transformer.capturable:
            tolerance = TOLERANCES[self.dtype]
            trial = GraphTrial(self._transformer, self.pack, self.max_length, tolerance)
            self._graphs = trial.capture(tuple(make_buckets()), self.device)
            self.target = self.target.launched_by(self._graphs)

    def select_tokens(self, packed: PackedBatch, selected: Sequence[bool]) -> TokenSelection:
        """The tokens of the selected sequences, their number rounded up as for a forward."""
        return select_tokens(packed, selected, self._multiple)

    def leave_out_unattended(self, length: int) -> None:
        """Exclude tokens that are marked as unattended, in sequences of at most `length` tokens.

        Raises `StartupError` if such a sequence is longer than the attention window.
        """
        window = self._transformer.window
        if window is not None and length > window:
            raise StartupError(
                f"queries are filled up to {length} tokens, and the model's tokens see no further "
                f"than {window}: only shorter queries are computed"
            )
        self._transformer = self._transformer.with_attention(leaving_out)

    def finish_loading(self) -> None:
        """Copy weights that are still mapped; forwards may run meanwhile."""
        self._transformer.finish_loading()

    def with_fewer_layers(self) -> tuple["Backbone", float]:
        """A copy with fewer layers, and by what factor this one has more."""
        fewer = copy(self)
        fewer._transformer, times = self._transformer.with_fewer_layers()  # noqa: SLF001 - its own
        return fewer, times


def cpu_multiple(tokens: int) -> int:
    """The multiple to which the rows of a forward of `tokens` are rounded up on a CPU."""
    return next((by for most, by in _CPU_MULTIPLES if tokens <= most), _CPU_LARGE_MULTIPLE)


def load_tokenizer(folder: Path, max_length: int) -> TextTokenizer:
    """Load an encoder's tokenizer; texts are cut to `max_length` or the number of positions.

    Raises `StartupError` for a folder that cannot be used.
    """
    return TextTokenizer.from_folder(folder, min(max_length, EncoderConfig.read(folder).max_length))


def load_encoder(
    folder: Path, target: Target, tokenizer: TextTokenizer, weights: Weights | None = None
) -> Backbone:
    """Load an encoder of BERT's or RoBERTa's architecture, from `weights` if they are given.

    `tokenizer` is that of the model. Raises `StartupError` for a folder that cannot be used.
    """
    config = EncoderConfig.read(folder)
    if target.quantized:
        _require_quantizable(config)
    weights = Weights.read(folder) if weights is None else weights
    target = target.prove(_encoder_shapes(config), _encoder_operations(target))
    make = partial(_quantized, tokenizer) if target.quantized else _unquantized
    return Backbone(
        make(weights, config, target),
        target,
        hidden_size=config.width,
        max_length=config.max_length,
        parameters=config.parameters,
        padding=config.padding,
        reads_segments=config.reads_segments,
    )


def load_decoder(folder: Path, target: Target, weights: Weights) -> Backbone:
    """Load a decoder of Qwen3's architecture; raises `StartupError` if it cannot be used."""
    config = DecoderConfig.read(folder)
    if target.quantized:
        raise StartupError(
            "DTYPE=int8 is for models of bge-m3's and bge-reranker's kind, and this is one of type "
            "qwen3; set DTYPE to auto"
        )
    target = target.prove(_decoder_shapes(config), DECODER)
    parameters = DecoderParameters(weights, config, target.device, target.dtype)
    return Backbone(
        make_decoder(parameters, target.backend),
        target,
        hidden_size=config.width,
        max_length=config.positions,
        parameters=config.parameters,
    )


def _require_quantizable(config: EncoderConfig) -> None:
    if not (can_quantize(config.width) and can_quantize(config.inner_width)):
        raise StartupError(
            f"DTYPE=int8 needs widths that are multiples of 4, not {config.width} and "
            f"{config.inner_width}; set DTYPE to auto"
        )


def _encoder_operations(target: Target) -> tuple[str, ...]:
    if target.quantized:
        return QUANTIZED_ENCODER
    return ENCODER if target.device.type == "cpu" else GPU_ENCODER


def _encoder_shapes(config: EncoderConfig) -> Shapes:
    return Shapes(
        width=config.width,
        inner_width=config.inner_width,
        heads=config.heads,
        key_heads=config.heads,
        head_width=config.width // config.heads,
        activation=config.activation,
    )


def _decoder_shapes(config: DecoderConfig) -> Shapes:
    return Shapes(
        width=config.width,
        inner_width=config.inner_width,
        heads=config.heads,
        key_heads=config.key_heads,
        head_width=config.head_width,
        bias=False,
        causal=True,
    )


def _unquantized(weights: Weights, config: EncoderConfig, target: Target) -> Encoder:
    parameters = EncoderParameters(weights, config, target.device, target.dtype)
    return make_encoder(parameters, target.backend)


def _quantized(
    tokenizer: TextTokenizer, weights: Weights, config: EncoderConfig, target: Target
) -> Encoder:
    # In float32, so that the weights of the file are rounded only once.
    parameters = EncoderParameters(weights, config, target.device, torch.float32)
    texts = calibration_sequences(tokenizer)
    # Rows that only round the forward up have large values. They are part of the calibration, or
    # they would be outliers, which are computed twice.
    multiple = sum(map(len, texts)) + _CPU_LARGE_MULTIPLE
    packed = pack(texts, device=target.device, roberta_padding=config.padding, multiple=multiple)
    return make_quantized_encoder(parameters, target.backend, target.dtype, packed)
