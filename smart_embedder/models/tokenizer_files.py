"""Reads the tokenizer of a folder.

`tokenizer.json` is the truth, as for text-embeddings-inference, FastEmbed and transformers 4. What
transformers 4 applied to it from the files beside it is applied too. A contradiction, also a class
for which transformers 5 builds another tokenizer, is a warning with an example.
"""

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from tokenizers import Tokenizer, normalizers
from xxhash import xxh3_128_digest

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import read_optional
from smart_embedder.models.files.reading import read_file
from smart_embedder.models.tokenizer_options import (
    EXAMPLES,
    GENERIC,
    apply_other_files,
    encode_texts,
    find_class,
    warn_of_contradiction,
)

log = structlog.get_logger(__name__)

# The members of truncation and padding, which stand at the beginning of a tokenizer's file.
_LIMITS = re.compile(rb'"(?:truncation|padding)"\s*:\s*(?:null|\{(?:[^{}]|\{[^{}]*\})*\})\s*,?\s*')
_BEGINNING = 4096
# Every vocabulary lacks one of these characters, unless it has all bytes.
_RARE = "\ua015 \u13a3 \u2603 \U0001f9ff"
# The usual tokenizers, by class or type of model: their model, the steps that split texts, and how
# many tokens they put around a text.
_BERT = ("WordPiece", ["BertPreTokenizer"]), {2}
_ROBERTA = ("BPE", ["ByteLevel"]), {2}
_XLM = ("Unigram", ["WhitespaceSplit", "Metaspace always"]), {2}
_QWEN = ("BPE", ["Split", "ByteLevel"]), {0, 1}
_USUAL = {
    "BertTokenizer": _BERT, "bert": _BERT, "RobertaTokenizer": _ROBERTA, "roberta": _ROBERTA,
    "XLMRobertaTokenizer": _XLM, "xlm-roberta": _XLM, "Qwen2Tokenizer": _QWEN, "qwen2": _QWEN,
    "qwen3": _QWEN,
}  # fmt: skip
# By the content of the file, so that a replaced file is parsed again.
_parsed_ahead: dict[bytes, "Future[Tokenizer]"] = {}


@contextmanager
def parse_ahead(paths: Iterable[Path]) -> Iterator[None]:
    """Parse these files on another thread, for each `read_tokenizer` in the block.

    `read_tokenizer` raises the errors of that thread. The tokenizers library holds the GIL for most
    of the time.
    """
    threads = ThreadPoolExecutor(1, thread_name_prefix="parse-ahead")
    for path in filter(Path.is_file, paths):
        with suppress(OSError, StartupError):
            content = read_file(path)
            if content not in _parsed_ahead:
                _parsed_ahead[content] = threads.submit(_parse, content)
    try:
        yield
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        _parsed_ahead.clear()


def _parse(content: bytes) -> Tokenizer:
    return Tokenizer.from_buffer(content)


def read_tokenizer(
    folder: Path, *, closing: str | None = None, lower_case: bool = False
) -> tuple[Tokenizer, bytes]:
    """Read a folder's tokenizer, and a digest of all that decides which tokens a text has.

    `closing` is a token that the caller adds to texts. Raises `StartupError` if the tokenizer is
    unusable or of another model.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise StartupError(f"{folder} holds no tokenizer.json")
    try:
        content = read_file(path)
        ahead = _parsed_ahead.pop(content, None)
        tokenizer = _parse(content) if ahead is None else ahead.result()
        _require_usable(tokenizer, folder)
        is_changed = apply_other_files(tokenizer, folder)
        _warn_of_class(tokenizer, folder)
        _warn_of_truncation_side(tokenizer, folder)
        # The repr of these is hashed: another order or type would change vector space ids.
        options: tuple[object, ...]
        options = (lower_case, closing, tokenizer.to_str() if is_changed else None)
        if tokenizer.encode_special_tokens:
            options = (*options, "split_special_tokens")
        if lower_case:
            normalizer, lower = tokenizer.normalizer, normalizers.Lowercase()
            tokenizer.normalizer = (
                lower if normalizer is None else normalizers.Sequence([lower, normalizer])
            )
    except StartupError:
        raise
    except BaseException as error:
        # The tokenizers library raises bare Exception, and panics of Rust, which are none.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise StartupError(f"{path} cannot be read: {error}") from error
        raise
    # Programs rewrite the limits in the file, which have no effect here.
    content = _LIMITS.sub(b"", content[:_BEGINNING]) + content[_BEGINNING:]
    return tokenizer, xxh3_128_digest(content + repr(options).encode())


def _require_usable(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise `StartupError` for a tokenizer that would fail or misread texts later."""
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    embedded = read_optional(folder / "config.json").get("vocab_size", tokens)
    if tokens > embedded:  # For a token without an embedding a whole batch would fail.
        raise StartupError(
            f"the tokenizer in {folder} has {tokens} tokens, and the model only {embedded}: "
            "they are not of one model"
        )
    if getattr(tokenizer.model, "dropout", None):
        raise StartupError(
            f"the tokenizer in {folder} splits a text differently each time (dropout in "
            "tokenizer.json): set it to null"
        )
    try:
        tokenizer.encode(_RARE, add_special_tokens=False)
    except Exception as error:  # The tokenizers library raises bare Exception.
        raise StartupError(f"the tokenizer cannot read an unknown word: {error}") from error


def _warn_of_class(tokenizer: Tokenizer, folder: Path) -> None:
    """Log a class for which transformers 5 builds another tokenizer than `tokenizer.json` has."""
    kind = find_class(folder)
    if kind in GENERIC or _is_usual(tokenizer, kind):
        return
    from transformers import AutoTokenizer  # noqa: PLC0415 - it takes seconds

    try:
        theirs = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        other_ids = [theirs(text)["input_ids"] for text in EXAMPLES]
    except Exception:  # noqa: BLE001 - any class of transformers may fail in some way
        return
    examples = zip(EXAMPLES, encode_texts(tokenizer, EXAMPLES), other_ids, strict=True)
    detail = (
        f"transformers 5 builds another tokenizer for {kind}, which computes other_ids; this "
        "service reads tokenizer.json, as transformers 4 did"
    )
    warn_of_contradiction(folder, ["tokenizer_class"], examples, detail)


def _is_usual(tokenizer: Tokenizer, kind: str) -> bool:
    """Return whether a class is one of the usual, and builds the tokenizer that the file has."""
    parts, counts = _USUAL.get(kind, (None, set()))
    words = tokenizer.pre_tokenizer
    described = {} if words is None else json.loads(words.__getstate__())
    steps = [
        " ".join(filter(None, (step.get("type"), step.get("prepend_scheme"))))
        for step in described.get("pretokenizers", [described])
    ]
    is_built = parts == (type(tokenizer.model).__name__, steps)
    return is_built and tokenizer.num_special_tokens_to_add(is_pair=False) in counts


def _warn_of_truncation_side(tokenizer: Tokenizer, folder: Path) -> None:
    """Log that a tokenizer's configuration would cut texts at their beginning."""
    side = read_optional(folder / "tokenizer_config.json").get("truncation_side")
    if (side or (tokenizer.truncation or {}).get("direction")) == "left":
        log.warning(
            "truncation_side_not_followed",
            model=folder.name,
            detail="its tokenizer cuts long texts at their beginning (truncation_side), and this "
            "service at their end, unless a request says otherwise",
        )
