"""The packed forward of every family against transformers' own padded forward."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    BertConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from smart_embedder.errors import StartupError
from smart_embedder.models.attention.packed import excluding_unattended
from smart_embedder.models.batch.packing import PositionScheme
from smart_embedder.models.device.choose import cpu_has_int8
from smart_embedder.models.families.backbone import Backbone, Target, cpu_multiple
from smart_embedder.models.families.load import load_encoder, load_tokenizer
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.text.tokenizer import TextTokenizer

CPU = torch.device("cpu")
SIZE = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "xlm-roberta": XLMRobertaConfig(
        **SIZE, intermediate_size=64, max_position_embeddings=70, pad_token_id=1
    ),
    "roberta": RobertaConfig(
        **SIZE, intermediate_size=64, max_position_embeddings=70, pad_token_id=1
    ),
    "bert": BertConfig(**SIZE, intermediate_size=64, max_position_embeddings=70),
}


def target(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Target:
    return Target(CPU, dtype, choose_backend(CPU, dtype, attention))


def load(folder: Path, how: Target) -> Backbone:
    """For what is not in 8 bits: calibration alone reads texts."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    return load_encoder(folder, how, TextTokenizer(tokenizer, 16))


def save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModel.from_config(copy.deepcopy(config)).save_pretrained(folder)
    return folder


def padded_states(folder: Path, sequences: list[np.ndarray]) -> list[torch.Tensor]:
    """transformers' own forward over one padded batch, attention computed eagerly."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = [torch.from_numpy(ids) for ids in sequences]
    padding = model.config.pad_token_id or 0
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return [state[: len(row)] for state, row in zip(states, rows, strict=True)]


def random_sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 120, length) for length in (5, 17, 5, 1, 44, 17, 3, 68)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_forward_equals_the_padded_one(family, attention, tmp_path: Path) -> None:
    folder = save(CONFIGS[family], tmp_path)
    sequences = random_sequences()
    backbone = load(folder, target(attention))
    packed = backbone.pack(sequences)
    with torch.inference_mode():
        hidden = backbone.forward(packed)
    for index, expected in enumerate(padded_states(folder, sequences)):
        place = packed.unpack_order[index]
        actual = hidden[packed.offsets[place] : packed.offsets[place + 1]]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "longest"), [("xlm-roberta", 68), ("bert", 70)])
def test_max_length_is_what_the_position_table_holds(family, longest, tmp_path: Path) -> None:
    assert load(save(CONFIGS[family], tmp_path), target()).max_length == longest


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_runs_in_the_target_dtype(dtype, family, tmp_path: Path) -> None:
    backbone = load(save(CONFIGS[family], tmp_path), target(dtype=dtype))
    with torch.inference_mode():
        assert backbone.forward(backbone.pack(random_sequences())).dtype == backbone.dtype == dtype


def test_a_bin_file_gives_the_same_numbers_as_safetensors(tmp_path: Path) -> None:
    folder = save(CONFIGS["xlm-roberta"], tmp_path)
    from_safetensors = load(folder, target())
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    from_bin = load(folder, target())
    packed = from_bin.pack(random_sequences())
    with torch.inference_mode():
        assert torch.equal(from_bin.forward(packed), from_safetensors.forward(packed))


@pytest.mark.parametrize(("layers", "times"), [(36, 12), (24, 12), (12, 6), (2, 1)])
def test_it_tells_how_many_times_as_many_layers_it_has(
    layers: int, times: float, tmp_path: Path
) -> None:
    config = copy.deepcopy(CONFIGS["bert"])
    config.num_hidden_layers = layers
    assert load(save(config, tmp_path), target()).with_fewer_layers()[1] == times


MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
@pytest.mark.parametrize("save_as", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "how",
    [
        target(),
        target(dtype=torch.bfloat16),
        replace(target(dtype=torch.bfloat16), quantized=True),
    ],
    ids=["float32", "bfloat16", "int8"],
)
@torch.inference_mode()
def test_its_files_are_left_and_may_be_written_over(
    how: Target, save_as: str, tiny_m3: Path, tmp_path: Path
) -> None:
    if how.quantized and not cpu_has_int8():
        pytest.skip("needs an x86 processor with AVX2")
    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    path = folder / "model.safetensors"
    if save_as == "bin":
        torch.save(load_file(path), folder / "pytorch_model.bin")
        path.unlink()
        path = folder / "pytorch_model.bin"
    backbone = load_encoder(folder, how, load_tokenizer(folder, 8192))
    packed = backbone.pack(random_sequences())
    before = backbone.forward(packed)
    assert str(folder) not in MAPS.read_text()
    assert str(path) not in {each.path for each in psutil.Process().open_files()}
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.truncate(100)
    assert torch.equal(backbone.forward(packed), before)
    assert backbone.dtype == how.dtype


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(StartupError, match="of type gpt2; known here: xlm-roberta, "):
        load(tmp_path, target())


def test_a_truncated_weight_file_is_an_error(tmp_path: Path) -> None:
    path = save(CONFIGS["bert"], tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StartupError, match="weights in .* cannot be loaded"):
        load(tmp_path, target())


def test_missing_weight_file_is_an_error(tmp_path: Path) -> None:
    (save(CONFIGS["bert"], tmp_path) / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="weights in .* cannot be loaded"):
        load(tmp_path, target())


def test_a_missing_tensor_is_never_filled_with_random_numbers(tmp_path: Path) -> None:
    path = save(CONFIGS["bert"], tmp_path) / "model.safetensors"
    weights = load_file(path)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(StartupError, match="lacks the tensor encoder.layer.1.output.dense.weight"):
        load(tmp_path, target())


def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    path = save(CONFIGS["bert"], tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["encoder.layer.0.output.dense.bias"] = torch.zeros(31)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        StartupError, match=r"another shape for the tensor .*\.0\.output\.dense\.bias"
    ):
        load(tmp_path, target())


class Payload:
    """What unpickling must never run."""

    def __reduce__(self):
        return (print, ("arbitrary code ran",))


def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path: Path, capsys) -> None:
    folder = save(CONFIGS["bert"], tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(StartupError, match="weights in .* cannot be loaded"):
        load(folder, target())
    assert "arbitrary code ran" not in capsys.readouterr().out


@given(st.integers(1, 20_000))
def test_a_cpu_computes_few_rows_more_than_asked_for_in_few_sizes(tokens) -> None:
    multiple = cpu_multiple(tokens)
    rounded = tokens + -tokens % multiple
    assert rounded - tokens <= tokens / 4
    assert rounded <= 32 or rounded % 8 == 0
    assert rounded <= 512 or rounded % 32 == 0


class FakeTransformer:
    """What a backbone asks a transformer for, and no numbers."""

    shares_prefixes = capturable = False
    rounds_up, window = True, None
    fill = 0.0

    def __call__(self, packed):
        return torch.full((packed.tokens, 4), self.fill)

    def with_attention(self, change):
        changed = FakeTransformer()
        changed.fill = float(change is excluding_unattended)
        return changed


def backbone_of(
    device: str = "cpu", dtype: torch.dtype = torch.float32, segments: int = 0, **options
) -> Backbone:
    transformer = FakeTransformer()
    for name, value in options.items():
        setattr(transformer, name, value)
    how = replace(target(), device=torch.device(device), dtype=dtype)
    positions = PositionScheme(segment_offset=segments)
    return Backbone(
        transformer, how, hidden_size=4, max_length=70, parameters=100, positions=positions
    )


@pytest.mark.parametrize(("tokens", "multiple"), [(1, 1), (32, 1), (33, 8), (512, 8), (513, 32)])
def test_rows_are_rounded_up_on_a_cpu_where_the_transformer_gains_by_it(tokens, multiple) -> None:
    assert cpu_multiple(tokens) == multiple
    sequences = [np.ones(tokens, np.int64)]
    rounded = -(-tokens // multiple) * multiple
    packed = backbone_of().pack(sequences)
    assert (packed.tokens, len(backbone_of().forward(packed))) == (rounded, rounded)
    assert backbone_of(rounds_up=False).pack(sequences).tokens == tokens
    two = [*sequences, np.ones(5, np.int64)]
    selected, _ = backbone_of().select_tokens(backbone_of().pack(two), [True, False])
    assert len(selected) == rounded


@pytest.mark.parametrize(
    ("device", "dtype", "sent"),
    [
        ("cpu", torch.float32, torch.float32),
        ("cpu", torch.bfloat16, torch.float32),
        ("cuda", torch.float32, torch.float32),
        ("cuda", torch.float16, torch.float16),
        ("cuda", torch.bfloat16, torch.float16),
    ],
)
def test_vectors_leave_a_gpu_in_as_many_bits_as_they_have(device, dtype, sent) -> None:
    assert backbone_of(device, dtype).wire_dtype is sent


def test_segments_are_read_where_their_positions_follow_those_of_the_first() -> None:
    assert [backbone_of(segments=offset).reads_segments for offset in (0, 1, 70)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(("window", "fits"), [(None, True), (32, True), (31, False)])
def test_queries_are_filled_up_within_the_window_alone(window, fits: bool) -> None:
    backbone = backbone_of(window=window)
    if fits:
        packed = backbone.pack([np.ones(3, np.int64)])
        assert not backbone.forward(packed).any()
        backbone.leave_out_unattended(32)
        assert backbone.forward(packed).all()
    else:
        with pytest.raises(StartupError, match="filled up to 32 tokens, .* no further than 31"):
            backbone.leave_out_unattended(32)


def test_graphs_are_for_gpus_and_for_transformers_that_can_be_captured() -> None:
    for backbone in (backbone_of(capturable=True), backbone_of("cuda")):
        assert list(backbone.capture_graphs_in_steps()) == []
