"""The input files of a job and the ids of rows; these tests need no cluster."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.ray.blocks import InputError, find_input, list_blocks


def write(path: Path, rows: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(rows)]}), path)
    return path


def places(*paths: Path) -> list[str]:
    found = find_input([*paths])
    return [
        row.location
        for label, path in found.files.items()
        for block in list_blocks(label, path, 7, 50)
        for row in block.rows()
    ]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table as Spark and Hive store it: the same file names in every folder."""
    folder = tmp_path / "table"
    for day in ("day1", "day2"):
        write(folder / day / "part-00000.parquet", 20)
    (folder / "day1" / "more.jsonl").write_text('{"text": "a"}\n' * 10)
    (folder / "_SUCCESS").touch()
    (folder / "day1" / ".part-00000.parquet.crc").touch()
    write(folder / "_temporary" / "part-00000.parquet", 3)
    (folder / "notes.csv").touch()
    (folder / "day2" / "README").touch()
    return folder


def test_rows_of_files_with_the_same_name_have_different_ids(table: Path) -> None:
    found = places(table)
    assert len(set(found)) == len(found) == 50
    assert "table/day1/part-00000.parquet:0:0" in found
    assert "table/day2/part-00000.parquet:0:19" in found
    assert set(places(table / "day1", table / "day2")) == {
        place.removeprefix("table/") for place in found
    }


def test_ids_do_not_change_when_the_input_grows(table: Path) -> None:
    before = places(table)
    write(table / "day0" / "part-00000.parquet", 5)
    assert set(before) < set(places(table))


def test_skipped_files_are_counted_by_suffix(table: Path) -> None:
    assert find_input([table]).skipped == {".csv": 1, "no ending": 1}


def test_files_with_the_same_label_are_refused(table: Path) -> None:
    files = [table / day / "part-00000.parquet" for day in ("day1", "day2")]
    with pytest.raises(InputError, match=r"the same ids, which begin with part-00000\.parquet"):
        find_input(files)
    # A file that is given twice, by its path and by its folder, has two labels.
    with pytest.raises(InputError, match="is named twice"):
        find_input([table, files[0]])
