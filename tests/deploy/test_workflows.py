"""The workflows: pinned actions and minimal permissions."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}|\./\.github/workflows/[\w-]+\.yml")


@pytest.mark.parametrize("name", ["ci", "release"])
def test_actions_are_pinned_and_permissions_are_minimal(
    name: str,
) -> None:
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        used = [step["uses"] for step in (job, *job.get("steps", ())) if "uses" in step]
        assert used
        assert all(PINNED.fullmatch(action) for action in used), used
        assert set(job.get("needs", ())) <= set(workflow["jobs"])


def test_published_artifacts_are_tested_and_image_stages_exist() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert all(jobs[name]["needs"] == ["tests", "version"] for name in ("images", "packages"))
    for image in jobs["images"]["strategy"]["matrix"]["include"]:
        file = (ROOT / f"Dockerfile.{image['device']}").read_text()
        assert image["target"] in re.findall(r" AS (\w+)$", file, re.MULTILINE)
    for folder in jobs["packages"]["strategy"]["matrix"]["folder"]:
        assert (ROOT / folder / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("heading", "printed"),
    [
        ("## 2.0.0 (2026-12-01)", "\n### Added\n\n- Vectors.\n\n"),
        ("## 2.0.0 (not released yet)", None),
        ("## 2x0.0 (2026-12-01)", None),
    ],
)
def test_release_notes_are_the_versions_section_of_the_changelog(
    heading: str, printed: str | None, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/release_notes.sh", tmp_path / "scripts")
    changelog = (
        f"# Changelog\n\n{heading}\n\n### Added\n\n- Vectors.\n\n## 1.9.0 (2026-01-01)\n\n- Old.\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    done = subprocess.run([script, "2.0.0"], capture_output=True, text=True, check=False)
    if printed is None:
        assert (done.returncode, done.stdout) == (1, "")
        assert "has no section '## 2.0.0 (YYYY-MM-DD)'" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, printed)
