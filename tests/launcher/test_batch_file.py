"""start_server.bat, read only."""

import re

from tests.launcher.checkout import ROOT


def test_windows_launcher_has_windows_line_ends_and_every_label_it_jumps_to() -> None:
    text = (ROOT / "start_server.bat").read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n"), "cmd misses labels in files with bare newlines"
    labels = set(re.findall(rb"^:(\w+)", text, re.MULTILINE))
    jumps = set(re.findall(rb"\bgoto (\w+)|\bcall :(\w+)", text))
    assert {goto or call for goto, call in jumps} <= labels
