"""Finding a model on disk or in the hub's cache, and reading its heads."""

import dataclasses
import errno
import json
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint import hub as checkpoint
from smart_embedder.models.checkpoint.config import read_config, read_pooling
from smart_embedder.models.checkpoint.hub import Hub, locate
from smart_embedder.models.checkpoint.weights import read_linear
from smart_embedder.models.loader import ModelFolders, locate_models
from smart_embedder.settings import Settings


def offline(cache: Path, revision: str | None = None) -> Hub:
    return Hub(cache=cache, revision=revision, offline=True)


def cached_model(cache: Path, commit: str = "a" * 40, name: str = "example/m3") -> Path:
    """A model as huggingface_hub stores it after a download."""
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    return snapshot


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate(str(tmp_path), offline(tmp_path / "cache")) == tmp_path


def test_a_hub_id_is_found_in_the_cache_without_the_network(tmp_path: Path) -> None:
    snapshot = cached_model(tmp_path)
    assert locate("example/m3", offline(tmp_path)) == snapshot


def test_a_revision_chooses_its_own_snapshot(tmp_path: Path) -> None:
    cached_model(tmp_path, "a" * 40)
    other = cached_model(tmp_path, "b" * 40)
    assert locate("example/m3", offline(tmp_path, "b" * 40)) == other


def test_a_downloaded_model_is_served_when_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    """Tests run with HF_HUB_OFFLINE=1, so the hub's client refuses as an unplugged cable would."""
    snapshot = cached_model(tmp_path)
    online = Hub(cache=tmp_path, revision=None, offline=False)
    assert locate("example/m3", online) == snapshot
    with pytest.raises(StartupError, match=r"hub cannot be reached\. The model example/absent is"):
        locate("example/absent", online)


def test_each_model_has_a_revision_of_its_own(tmp_path: Path) -> None:
    folders = {x: cached_model(tmp_path / "hub", x * 40, name=f"a/{x}") for x in "bde"}
    others = {x: cached_model(tmp_path / "hub", "f" * 40, name=f"a/{x}") for x in "bde"}
    models = {"embedding_model": "a/b", "dense_embedding_model": "a/d", "reranker_model": "a/e"}
    common = {"hf_home": tmp_path, "hf_hub_offline": True, **models}
    mine = {
        "model_revision": "b" * 40,
        "dense_model_revision": "d" * 40,
        "reranker_model_revision": "e" * 40,
    }
    assert locate_models(Settings(**common, **mine)) == ModelFolders(*folders.values())
    # Without one it is the newest, which was fetched last.
    for place, setting in enumerate(mine):
        rest = {name: revision for name, revision in mine.items() if name != setting}
        found = dataclasses.astuple(locate_models(Settings(**common, **rest)))
        expected = [*folders.values()]
        expected[place] = [*others.values()][place]
        assert found == tuple(expected)


def test_a_revision_that_has_no_effect_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "m3").mkdir()
    revisions = {"model_revision": "v1", "dense_model_revision": "v2"}
    more = {"reranker_model": "none", "reranker_model_revision": "v3"}
    with capture_logs() as logs:
        locate_models(Settings(embedding_model=str(tmp_path / "m3"), **revisions, **more))
    assert [(line["event"], line["model"], line["revision"]) for line in logs] == [
        ("revision_not_used", "m3", "v1"),
        ("revision_not_used", "m3", "v2"),
        ("revision_not_used", "none", "v3"),
    ]


def test_a_revision_that_is_not_on_the_disk_is_named(tmp_path: Path) -> None:
    cached_model(tmp_path, "a" * 40)
    with pytest.raises(StartupError, match="`hf download example/m3 --revision v2`"):
        locate("example/m3", offline(tmp_path, "v2"))


def test_offline_without_the_model_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        locate("example/absent", offline(tmp_path))
    assert "hf download example/absent" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./absent", "~/absent", "a/b/c", "absent"])
def test_a_path_that_is_not_there_is_not_sought_on_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        locate(name, offline(tmp_path))


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "snapshot_download", full)
    with pytest.raises(StartupError, match="cannot be stored in .*No space left on device"):
        locate("example/m3", offline(tmp_path))


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is not a model: it holds no config.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_damaged_config_is_told_as_such(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
    ],
)
def test_pooling_is_read_from_sentence_transformers_config(modes, expected, tmp_path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert read_pooling(tmp_path) == expected


def test_pooling_is_cls_as_bge_m3s_where_nothing_is_said(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == "cls"


def test_a_pooling_not_known_here_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(StartupError, match="no pooling that is known for this kind"):
        read_pooling(tmp_path)


def test_a_head_is_read_as_it_was_saved(tmp_path: Path) -> None:
    linear = torch.nn.Linear(6, 1)
    torch.save(linear.state_dict(), tmp_path / "sparse_linear.pt")
    read = read_linear(tmp_path / "sparse_linear.pt", 6, 1)
    assert torch.equal(read.weight, linear.weight)
    assert torch.equal(read.bias, linear.bias)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="head sparse_linear.pt is missing in"):
        read_linear(tmp_path / "sparse_linear.pt", 6, 1)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "keys", "list"])
def test_a_damaged_head_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "sparse_linear.pt"
    torch.save(torch.nn.Linear(6, 1).state_dict(), path)
    whole = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("not a tensor")
        case "keys":
            torch.save({"weight": torch.zeros(1, 6)}, path)
        case "list":
            torch.save([1, 2], path)
    with pytest.raises(StartupError, match="head .*sparse_linear.pt is damaged"):
        read_linear(path, 6, 1)


@pytest.mark.parametrize("shape", [(1, 7), (2, 6)])
def test_a_head_of_the_wrong_shape_is_named_with_both_shapes(shape, tmp_path: Path) -> None:
    path = tmp_path / "sparse_linear.pt"
    torch.save(torch.nn.Linear(shape[1], shape[0]).state_dict(), path)
    with pytest.raises(StartupError, match=r"wrong shape: weight \[\d, \d\].*\[1, 6\]"):
        read_linear(path, 6, 1)
