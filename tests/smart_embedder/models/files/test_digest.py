"""Vector spaces: a change of the numbers changes the id, and nothing else does."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from smart_embedder.kernels.backend import torch_backend
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.bert import EncoderConfig
from smart_embedder.models.files.digest import TensorDigest, encode_short
from smart_embedder.models.files.record import ReadRecord
from smart_embedder.models.loader import load_embedder, load_reranker
from smart_embedder.vector_space import VectorSpace
from tests.support.checkpoints import changed_json, changed_weights
from tests.support.encoders import (
    dense,
    float32,
    save_family,
    save_modules,
    save_tokenizer,
    word_tokenizer,
)
from tests.support.wordpiece import change as change_members

WEIGHTS = "model.safetensors"
CPU = torch.device("cpu")
PROMPTS = {"prompts": {"query": "Query: ", "document": ""}}

Change = Callable[[Path], Any]
Spaces = dict[str, VectorSpace]


@pytest.fixture(scope="module", params=["bert"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense encoder with a projection."""
    folder = tmp_path_factory.mktemp("spaces") / request.param
    save_family(folder, request.param, word_tokenizer())
    torch.manual_seed(5)
    save_modules(folder, further=[dense(32, "Tanh"), ("Normalize", {}, None)], prompts=PROMPTS)
    return folder


@pytest.fixture(scope="module")
def unchanged(encoder: Path) -> Spaces:
    return spaces(encoder)


def spaces(folder: Path) -> Spaces:
    return {**load_embedder("model", folder, 8192, float32()).spaces}


def differences(before: Spaces, after: Spaces) -> dict[str, str]:
    """Return the parts of the id that differ, for each kind that differs."""
    assert before.keys() == after.keys()
    found = {}
    for kind, space in after.items():
        names = [field.name for field in fields(space)]
        differing = [name for name in names if getattr(space, name) != getattr(before[kind], name)]
        assert (str(space) != str(before[kind])) == bool(differing)
        if differing:
            found[kind] = ", ".join(differing)
    return found


def change_json(name: str, **changes: Any) -> Change:
    return lambda folder: change_members(folder / name, **changes)


def change_tensors(
    change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    within: str = "",
    rename: Callable[[str], str] = lambda name: name,
) -> Change:
    """Return a function that changes the tensors with `within` in their names."""

    def change_file(folder: Path) -> None:
        with changed_weights(folder) as tensors:
            changed = {
                rename(name): change(tensor).contiguous() if within in name else tensor
                for name, tensor in tensors.items()
            }
            tensors.clear()
            tensors.update(changed)

    return change_file


def change_head(name: str) -> Change:
    def change(folder: Path) -> None:
        state = torch.load(folder / name)
        torch.save({key: tensor * 1.01 for key, tensor in state.items()}, folder / name)

    return change


def flip_a_byte(folder: Path) -> None:
    """Flip a bit of the last number in the file."""
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-4] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def swap_layers(name: str) -> str:
    first, second = "encoder.layer.0.", "encoder.layer.1."
    return name.replace(first, second) if first in name else name.replace(second, first)


def swap_two_tokens(folder: Path) -> None:
    with changed_json(folder / "tokenizer.json") as tokenizer:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[-1], vocabulary[-2] = vocabulary[-2], vocabulary[-1]


def pool_by_mean(folder: Path) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


OTHER_WEIGHTS = dict.fromkeys(("dense", "sparse", "colbert"), "weights")
# Changes of a model of bge-m3's kind, and the part that differs in the id of each kind.
M3_MISTAKES: dict[str, tuple[Change, dict[str, str]]] = {
    "a byte of a weight": (flip_a_byte, OTHER_WEIGHTS),
    "layers in another order": (change_tensors(rename=swap_layers), OTHER_WEIGHTS),
    "an epsilon": (change_json("config.json", layer_norm_eps=1e-3), OTHER_WEIGHTS),
    "a swapped tokenizer": (swap_two_tokens, dict.fromkeys(OTHER_WEIGHTS, "tokenizer")),
    "the lexical head": (change_head("sparse_linear.pt"), {"sparse": "projection"}),
    "ColBERT's head": (change_head("colbert_linear.pt"), {"colbert": "projection"}),
    "mean for cls": (pool_by_mean, {"dense": "pooling"}),
}


@pytest.fixture(scope="module")
def unchanged_m3(tiny_m3: Path) -> Spaces:
    return spaces(tiny_m3)


@pytest.mark.parametrize("mistake", M3_MISTAKES)
def test_vector_space_of_bge_m3_differs_in_the_changed_part(
    mistake: str, tiny_m3: Path, unchanged_m3: Spaces, tmp_path: Path
) -> None:
    change, expected = M3_MISTAKES[mistake]
    change(copy := shutil.copytree(tiny_m3, tmp_path / "copy"))
    assert differences(unchanged_m3, spaces(copy)) == expected


def leave_out_normalize(folder: Path) -> None:
    with changed_json(folder / "modules.json") as modules:
        modules.pop()


change_sentences = partial(change_json, "config_sentence_transformers.json")
DENSE_MISTAKES: dict[str, tuple[Change, str]] = {
    "cls for mean": (
        change_json(
            "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True
        ),
        "pooling",
    ),
    "a lost prompt": (change_sentences(prompts={}), "prompts"),
    "no normalisation": (leave_out_normalize, "projection, normalisation"),
    "another activation": (
        change_json("2_Dense/config.json", activation_function="torch.nn.modules.activation.ReLU"),
        "projection",
    ),
    "fewer dimensions": (
        change_sentences(truncate_dim=16),
        "projection, normalisation, dimensions",
    ),
    "cut sooner": (change_json("sentence_bert_config.json", max_seq_length=100), "truncation"),
    "lower case": (change_json("sentence_bert_config.json", do_lower_case=True), "tokenizer"),
}


@pytest.mark.parametrize("mistake", DENSE_MISTAKES)
def test_vector_space_of_an_encoder_differs_in_the_changed_part(
    mistake: str, encoder: Path, unchanged: Spaces, tmp_path: Path
) -> None:
    change, expected = DENSE_MISTAKES[mistake]
    change(copy := shutil.copytree(encoder, tmp_path / "copy"))
    assert differences(unchanged, spaces(copy)) == {"dense": expected}


def test_vector_space_covers_rotary_base_and_reranker_head(
    tiny_qwen: Path, tiny_reranker: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_qwen, tmp_path / "copy")
    change_json("config.json", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})(copy)
    before, after = spaces(tiny_qwen), spaces(copy)
    assert differences(before, after) == {"dense": "weights"}
    load = partial(load_reranker, max_length=512, target=float32(), max_pairs=4)
    of_decoder = load("model-reranker", tiny_qwen).spaces
    assert of_decoder.keys() == {"score"}
    assert of_decoder != load("model-reranker", copy).spaces
    other = shutil.copytree(tiny_reranker, tmp_path / "reranker")
    change_tensors(lambda tensor: tensor * 2, within="out_proj")(other)
    found = load("model", tiny_reranker).spaces, load("model", other).spaces
    assert differences(*map(dict, found)) == {"score": "weights"}


def limit_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(9)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))


def behind_a_prefix(folder: Path) -> None:
    is_bert = json.loads((folder / "config.json").read_text())["model_type"] == "bert"
    change_tensors(rename=("bert." if is_bert else "model.").__add__)(folder)


def link_to_it(folder: Path) -> None:
    folder.rename(folder.with_name("blobs"))
    folder.mkdir()
    for path in folder.with_name("blobs").rglob("*.*"):
        link = folder / path.relative_to(folder.with_name("blobs"))
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path)


HARMLESS: dict[str, Change] = {
    "another version's configuration": change_json(
        "config.json", transformers_version="4.30.0", _name_or_path="/home", torch_dtype="float32"
    ),
    "limits in the tokenizer": limit_tokenizer,
    "a prefix of names": behind_a_prefix,
    "a wider format": change_tensors(torch.Tensor.double),
    "links": link_to_it,
}


# Computed by our own layers, and by transformers.
@pytest.mark.parametrize("encoder", ["bert", "modernbert"], indirect=True)
@pytest.mark.parametrize("change", HARMLESS)
def test_vector_space_ignores_changes_without_effect(
    change: str, encoder: Path, unchanged: Spaces, tmp_path: Path
) -> None:
    HARMLESS[change](copy := shutil.copytree(encoder, tmp_path / "copy"))
    assert differences(unchanged, spaces(copy)) == {}


@pytest.mark.parametrize("encoder", ["bert", "modernbert"], indirect=True)
def test_vector_space_is_the_same_for_every_backend(encoder: Path, unchanged: Spaces) -> None:
    by_pytorch = Target(CPU, torch.float32, torch_backend())
    native = load_embedder("model", encoder, 512, float32())
    other = load_embedder("model", encoder, 512, by_pytorch)
    assert native.spaces == other.spaces == unchanged
    assert (native.reproducible, other.reproducible) == (encoder.name == "bert", False)


def test_vector_space_id_is_stable_between_versions() -> None:
    """If this fails, every stored collection would seem to be of another space."""
    facts = "ia7mlb2zwzaz", "7tteyayi", "cls", "none", "unit", "none", "512end", "384"
    assert str(VectorSpace("dense", *facts)) == "dense-7cd5e83d57f4"


def test_tensor_digest_is_stable_between_versions() -> None:
    """If this fails, every stored collection would seem to be of another space."""
    record = ReadRecord(Path("model"), Path("model"))
    for name, numbers in {
        "embeddings.weight": torch.arange(300_000, dtype=torch.float32).view(3, -1) / 7,
        "2_Dense/linear.weight": torch.arange(-8, 8).bfloat16(),
    }.items():
        digest = TensorDigest(numbers.shape)
        digest.add(0, numbers.view(-1))
        record.digests[name] = digest.finish()
    config = EncoderConfig(100, 64, 96, 2, 4, 514, 1, "gelu", 1e-5, 1)
    assert encode_short(record.combine_digests(record.digests, config), 12) == "ia7mlb2zwzaz"


def test_vector_space_is_the_same_with_absolute_module_paths(
    encoder: Path, unchanged: Spaces, monkeypatch, tmp_path: Path
) -> None:
    copy = shutil.copytree(encoder, tmp_path / "copy")
    with changed_json(copy / "modules.json") as modules:
        for module in modules[1:]:
            module["path"] = str(copy / module["path"])
    monkeypatch.chdir(tmp_path)
    assert differences(unchanged, spaces(Path("copy"))) == {}


@pytest.mark.parametrize(
    ("sizes", "reproducible"),
    [
        ({"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}, True),
        # The kernels multiply rows whose width is a multiple of 16.
        ({"hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4}, False),
        ({"hidden_size": 72, "intermediate_size": 96, "num_attention_heads": 3}, False),
    ],
)
def test_reproducible_is_false_for_shapes_without_native_kernels(
    sizes: dict[str, int], reproducible: bool, tmp_path: Path
) -> None:
    config = BertConfig(vocab_size=700, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    BertModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, word_tokenizer())
    model = load_embedder("model", tmp_path, 64, float32())
    assert model.reproducible == reproducible
