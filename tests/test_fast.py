"""What `./run_tests.sh --fast` leaves out."""

import pytest

from tests.support.fast import TESTS, left_out


@pytest.mark.parametrize(
    ("file", "is_left_out"),
    [
        ("launcher/test_venv.py", True),  # by its own imports: processes
        ("faults/test_device.py", True),  # by a fixture of the plugin: a server
        ("client/test_answers.py", True),  # by imports of what it imports
        ("app/ui/test_views.py", True),  # a browser
        (
            "smart_embedder/models/test_devices.py",
            True,
        ),  # by a fixture that it asks for by its name
        ("smart_embedder/test_vectors.py", False),
        ("smart_embedder/scheduling/test_batcher.py", False),
        ("app/middleware/test_request_log.py", False),  # in process
    ],
)
def test_files_that_start_processes_are_told_by_what_they_use(file: str, is_left_out: bool) -> None:
    assert (TESTS / file).exists()
    assert left_out(TESTS / file) == is_left_out
