"""Chat templates run in a sandbox: they reach neither Python's objects nor files."""

from pathlib import Path

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.models.files.chat_template import ChatTemplate


def render(folder: Path, source: bytes) -> str:
    (folder / "chat_template.jinja").write_bytes(source)
    template = ChatTemplate.read(folder)
    assert template is not None
    return template.render(("user", "a text"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            b"{{ ''.__class__.__mro__ }}",
            "access to attribute '__class__' of 'str' object is unsafe",
        ),
        (b"{% include '/etc/passwd' %}", "no loader for this environment"),
        (b"{{ messages.clear() }}", "access to attribute 'clear' of 'list' object is unsafe"),
        (b"{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        (b"{% for %}", "cannot be rendered: Expected an expression"),
        (b"{{ raise_exception('a\\n b') }}", "cannot be rendered: a b$"),
        (b"\xff", "chat_template.jinja cannot be read: 'utf-8' codec"),
    ],
)
def test_damaged_or_hostile_chat_template_is_refused(
    source: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message):
        render(tmp_path, source)


def test_chat_template_gets_the_messages_and_the_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    assert render(tmp_path, b"{{ bos_token }}{{ messages[0].content }}") == "<s>a text"
