"""The workflows: what they run is pinned, and may do no more than it says."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}|\./\.github/workflows/[\w-]+\.yml")


@pytest.mark.parametrize("name", ["ci", "release"])
def test_every_action_is_pinned_by_its_commit_and_nothing_may_write_unless_a_job_says_so(
    name: str,
) -> None:
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        used = [step["uses"] for step in (job, *job.get("steps", ())) if "uses" in step]
        assert used
        assert all(PINNED.fullmatch(each) for each in used), used
        assert set(job.get("needs", ())) <= set(workflow["jobs"])


def test_what_is_published_was_tested_and_the_images_are_stages_that_there_are() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert all(jobs[name]["needs"] == ["tests", "version"] for name in ("images", "packages"))
    for image in jobs["images"]["strategy"]["matrix"]["include"]:
        file = (ROOT / f"Dockerfile.{image['device']}").read_text()
        assert image["target"] in re.findall(r" AS (\w+)$", file, re.MULTILINE)
    for folder in jobs["packages"]["strategy"]["matrix"]["folder"]:
        assert (ROOT / folder / "pyproject.toml").is_file()
