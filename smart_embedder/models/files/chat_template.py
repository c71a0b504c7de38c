"""Reads chat templates, and renders texts with them, as sentence-transformers does.

A chat template is a program of Jinja, which transformers runs in a sandbox. It gets no object of
the service.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smart_embedder.errors import StartupError, one_line
from smart_embedder.models.files.config import read_optional
from smart_embedder.models.files.reading import read_file

_FILE = "chat_template.jinja"
# Files that may name a processor.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
# A function that transformers gives to templates.
_DATE = "strftime_now"
# Characters for private use, which no template has, in place of a text and a prompt.
_TEXT, _PROMPT = "\ue000", "\ue001"
# A text with spaces around it, which some templates remove.
_EXAMPLE = "\n an Example: {}. \n\n"
# The beginning of a message format whose contents are lists of typed parts, and not strings.
STRUCTURED = "structured"
# Signs in a template of that format, by which sentence-transformers knows it.
_SIGNS = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a folder, and its variables: special tokens and options."""

    folder: Path
    source: str
    variables: dict[str, Any]
    is_structured: bool

    @classmethod
    def read(
        cls, folder: Path, message_format: str = "auto", options: Iterable[tuple[str, Any]] = ()
    ) -> "ChatTemplate | None":
        """Read the template; None if the folder has none, or several by name."""
        config = read_optional(folder / "tokenizer_config.json")
        source = config.get("chat_template")
        if (file := folder / _FILE).is_file():
            try:
                source = read_file(file).decode()
            except (OSError, ValueError) as error:
                raise StartupError(f"{file} cannot be read: {error}") from error
        if not isinstance(source, str):
            return None
        named = read_optional(folder / "special_tokens_map.json") | config
        further = named.get("extra_special_tokens")
        named |= further if isinstance(further, dict) else {}
        tokens = {
            name: token.get("content", "") if isinstance(token, dict) else token
            for name, token in named.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        is_structured = message_format == STRUCTURED
        if message_format == "auto":
            is_structured = any(sign in source for sign in _SIGNS)
        return cls(folder, source, tokens | dict(options), is_structured)

    def render(self, *messages: tuple[str, str]) -> str:
        """Render messages, each a role and a text; raises `StartupError` if it is impossible."""
        if _DATE in self.source:
            raise StartupError(
                f"the chat template in {self.folder} says the date ({_DATE}), which is not "
                "supported: the same text would have other vectors on another day"
            )
        # transformers takes seconds to import.
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

        chat = [{"role": role, "content": self._make_content(text)} for role, text in messages]
        try:
            (rendered,), _ = render_jinja_template(
                [chat], chat_template=self.source, **self.variables
            )
        except Exception as error:
            raise StartupError(
                f"the chat template in {self.folder} cannot be rendered: {one_line(error):.200}"
            ) from error
        return str(rendered)

    def follow(self, *messages: tuple[str, str], may_strip: bool = False) -> tuple[str, bool]:
        """Render messages, each a role and a marker, which stands for any text.

        Returns also whether the template removes the spaces around texts, which it `may_strip`.
        Raises `StartupError` if it changes texts otherwise, or does not have each once. That of a
        system may be anywhere, and is never empty.
        """
        rendered, strips = self.render(*messages), False
        repeats = all(rendered.count(marker) == 1 for role, marker in messages if role != "system")
        for example in (_EXAMPLE, ""):
            texts = [
                (role, marker, (_EXAMPLE if role == "system" else example).format(number))
                for number, (role, marker) in enumerate(messages)
            ]
            tried = self.render(*((role, text) for role, _, text in texts))
            as_they_are, stripped = rendered, rendered
            for _, marker, text in texts:
                as_they_are = as_they_are.replace(marker, text)
                stripped = stripped.replace(marker, text.strip())
            strips = strips or tried != as_they_are
            repeats = repeats and tried in {as_they_are, stripped}
        if not repeats or (strips and not may_strip):
            raise StartupError(
                f"the chat template in {self.folder} does not repeat the text of each message "
                f"once, as it is{' or without the spaces around it' if may_strip else ''}"
            )
        return rendered, strips

    def _make_content(self, text: str) -> str | list[dict[str, Any]]:
        return [{"type": "text", "text": text}] if self.is_structured else text


@dataclass(frozen=True, slots=True)
class TextFrame:
    """What a chat template puts around a text, in place of the tokenizer's special tokens.

    `before_prompt` is read before a text with a prompt, and has the prompt at its place.
    """

    before: str
    before_prompt: str
    behind: str

    def begin(self, prompt: str) -> str:
        """Return what is read before a text."""
        return self.before_prompt.replace(_PROMPT, prompt) if prompt else self.before


class ProcessorFrame(TextFrame):
    """What a processor puts around a text, within the special tokens of the tokenizer."""


def read_text_frame(
    folder: Path, message_format: str, options: Iterable[tuple[str, Any]]
) -> TextFrame | None:
    """Read what the chat template of a folder puts around texts, or None if it changes nothing.

    sentence-transformers renders a text as the message of a user, behind a prompt as the system's.
    A processor adds the special tokens of the tokenizer, unless the template begins with one, and a
    tokenizer alone adds none. Raises
    `StartupError` if the template does not repeat texts as they are.
    """
    template = ChatTemplate.read(folder, message_format, options)
    if template is None:
        raise StartupError(
            f"{folder} reads texts as messages of a chat template, and has no template"
        )
    text, _ = template.follow(("user", _TEXT))
    prompted, _ = template.follow(("system", _PROMPT), ("user", _TEXT))
    before, behind = text.split(_TEXT)
    before_prompt, behind_prompted = prompted.split(_TEXT)
    if behind_prompted != behind:
        raise StartupError(
            f"the chat template in {folder} ends a text in another way behind a prompt, which is "
            "not supported"
        )
    frame = TextFrame(before, before_prompt, behind)
    begin = template.variables.get("bos_token")
    if not _has_processor(folder) or (begin and before.startswith(begin)):
        return frame
    is_plain = frame == TextFrame("", _PROMPT, "")
    return None if is_plain else ProcessorFrame(before, before_prompt, behind)


def _has_processor(folder: Path) -> bool:
    """Whether transformers reads the texts by a processor, and not by a tokenizer alone."""
    # transformers takes seconds to import.
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # noqa: PLC0415

    model_type = read_optional(folder / "config.json").get("model_type")
    named = (read_optional(folder / file).get("processor_class") for file in _PROCESSOR_FILES)
    return model_type in PROCESSOR_MAPPING_NAMES or any(named)
