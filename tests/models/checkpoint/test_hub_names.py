"""Which names are folders and which are ids of the hub, and what is said of what is not there."""

from pathlib import Path

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint import hub


@pytest.mark.parametrize(
    "name",
    ["/no/such", "/none", "./none", "../no/such", "~/no/such", "~no-one/such", "none", "a/b/c"],
)
def test_what_can_be_no_id_is_not_sought_on_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"^the model folder {name} does not exist$"):
        hub.locate(name, hub.Hub(tmp_path, None, offline=True))


@pytest.mark.parametrize(
    ("revision", "command"),
    [(None, "`hf download own/m3` "), ("v1", "`hf download own/m3 --revision v1` ")],
)
def test_offline_it_is_told_how_to_fetch_a_model_and_where_to_put_it(
    revision: str | None, command: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as caught:
        hub.locate("own/m3", hub.Hub(tmp_path, revision, offline=True))
    told = str(caught.value)
    assert told.startswith(f"The model own/m3 is not on this machine: fetch it with {command}where")
    assert f"copy it to {tmp_path} or name its folder" in told


def test_a_folder_is_a_model_whatever_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "m3").mkdir(parents=True)
    asked = hub.Hub(tmp_path / "none", None, offline=True)
    for name in ("own/m3", "own", str(tmp_path), "./own"):
        assert hub.locate(name, asked) == Path(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.locate("~/own", asked) == tmp_path / "own"
