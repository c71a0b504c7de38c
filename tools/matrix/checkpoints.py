"""Saves tiny random checkpoints: of a model type, and of modules of sentence-transformers."""

import inspect
import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Siglip2Tokenizer,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_MAPPING,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from smart_embedder.models.files.config import IMAGE_TEXT_TYPES
from tools.matrix.shrinking import (
    END,
    MASK,
    PAD,
    START,
    UNKNOWN,
    VOCABULARY,
    Shrinker,
)

# Texts are cut to this number of tokens, which is more than the shrunken windows have.
MAX_TOKENS = 60
_WORDS = [
    *["hybrid", "search", "vector", "dense", "sparse", "query", "passage"],
    *["river", "bread", "music", "winter", "garden"],
]
TEXTS = [
    "hybrid search", "", "vector", "...", "Dense Query", " ".join(_WORDS * 4), " ".join(_WORDS * 9),
]  # fmt: skip
PASSAGES = ["river bread", "music", "?", " ".join(_WORDS * 3), "winter garden, unknown"]
_MOST_PARAMETERS = 8_000_000
# A width of heads with which that of the model has a sixth, as for the edges of boxes.
_SIXTHS = 24
_SEGMENTS = "token_type_ids"
_SPECIAL = {"pad": PAD, "unk": UNKNOWN, "cls": START, "sep": END, "mask": MASK}


class NotBuiltError(Exception):
    """The tiny checkpoint cannot be made; the text says why."""


class NotATextModelError(Exception):
    """The model reads images, sound or numbers."""


def save_type(folder: Path, model_type: str, *, is_classifier: bool) -> None:
    """Save a random model of a type of transformers, with mean pooling or with one label.

    Raises `NotBuiltError`, and `NotATextModelError` for a type that reads something else.
    """
    try:
        model_class = _find_class(model_type, is_classifier)
        reads = inspect.signature(model_class.forward).parameters
    except (ImportError, ValueError) as error:  # Its libraries, or the class itself, are missing.
        raise NotATextModelError(str(error)) from error
    if model_class.main_input_name != "input_ids" or "input_ids" not in reads:
        raise NotATextModelError(f"{model_class.__name__} reads {model_class.main_input_name}")
    try:
        model, width = _make_small(model_type, model_class, is_classifier)
        save_random(model, folder)
    except NotBuiltError:
        raise
    except Exception as error:
        needs = "another library" if isinstance(error, ImportError) else "more than its defaults"
        message = f"{type(error).__name__} {' '.join(str(error).split()):.160}"
        raise NotBuiltError(f"needs {needs}: {message}") from error
    # As the tokenizer of the type does.
    tokenizer = TOKENIZER_MAPPING.get(type(model.config), None)
    names = getattr(tokenizer, "model_input_names", ())
    has_segments = getattr(model.config, "type_vocab_size", 0) > 1
    save_tokenizer(folder, [_SEGMENTS] if has_segments and _SEGMENTS in names else [])
    if model_type in IMAGE_TEXT_TYPES:
        save_image_processor(folder, model.config)
    elif not is_classifier:
        _save_pooling(folder, width)


def _find_class(model_type: str, is_classifier: bool) -> Any:
    """Return the classifier of a type, or its encoder: of a composite model the whole."""
    config = CONFIG_MAPPING[model_type]
    if is_classifier:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[config]
    found = MODEL_FOR_TEXT_ENCODING_MAPPING.get(config, None)
    if found is None or found.config_class is not config:
        found = MODEL_MAPPING[config]
    return found[0] if isinstance(found, tuple) else found


def load_reference(folder: Path, *, is_classifier: bool) -> Any:
    """Load the model in `folder` by transformers, in the class with which it was saved."""
    config = AutoConfig.from_pretrained(folder)
    return _find_class(config.model_type, is_classifier).from_pretrained(folder).eval()


def _make_small(model_type: str, model_class: Any, is_classifier: bool) -> tuple[Any, int]:
    """Make a model that computes a text, if possible, and return the width of its states."""
    whole = CONFIG_MAPPING[model_type]().to_dict()
    made: list[Any] = []
    problems: list[Exception] = []
    shrinkers = Shrinker(), Shrinker(completes=True), Shrinker(_SIXTHS, completes=True)
    for shrinker in shrinkers:
        try:
            torch.manual_seed(4)
            config = CONFIG_MAPPING[model_type].from_dict(shrinker.shrink(whole))
            if is_classifier:
                config.num_labels = 1
            if model_class.__name__.endswith("EncoderModel"):
                config.is_encoder_decoder = False
            with torch.device("meta"):
                count = sum(part.numel() for part in model_class(config).parameters())
            if count > _MOST_PARAMETERS:
                raise NotBuiltError(f"cannot be made small: {count:,} parameters")  # noqa: TRY301
            made.append(model_class(config).eval())
            with torch.inference_mode():
                ids = torch.tensor([[*range(MASK + 1, MASK + 20), END]])
                output = made[-1](input_ids=ids, attention_mask=torch.ones_like(ids))
            states = getattr(output, "last_hidden_state", None)
            return made[-1], 0 if states is None else states.shape[-1]
        except Exception as error:  # noqa: BLE001 - Each may mean that it cannot be so small.
            problems.append(error)
    if made:  # It needs more than a text.
        return made[0], 0
    raise problems[0]


def save_random(model: Any, folder: Path) -> None:
    """Save a model whose numbers are spread enough for the vectors of texts to differ."""
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.08)
    model.eval().save_pretrained(folder)


def _make_tokenizer() -> Tokenizer:
    """Make a WordPiece tokenizer of a few words, and of letters for all others."""
    vocabulary = {f"[{name.upper()}]": token for name, token in _SPECIAL.items()}
    letters = string.ascii_letters + string.digits
    for token in (
        *letters,
        *(f"##{letter}" for letter in letters),
        *string.punctuation,
        *_WORDS,
        "yes",
        "no",
    ):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106 - No secret.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", START), ("[SEP]", END)],
    )
    return tokenizer


def save_tokenizer(folder: Path, further_inputs: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Save the tokenizer that all checkpoints share, with the names of a model's inputs."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_make_tokenizer(),
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", *further_inputs, "attention_mask"],
        **{f"{name}_token": f"[{name.upper()}]" for name in _SPECIAL},
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _save_pooling(folder: Path, width: int) -> None:
    """Write the modules of a sentence-transformers model with mean pooling."""
    modules = [
        {"idx": index, "name": name, "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate({"": "Transformer", "1_Pooling": "Pooling"}.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def save_image_processor(folder: Path, config: Any) -> None:
    """Save the image processor of a type, for pictures of the size that the model reads."""
    if config.model_type == "siglip2":  # `AutoTokenizer` always makes its own class.
        letters = ["▁", *string.ascii_lowercase, *string.punctuation]
        vocabulary = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *letters]
        Siglip2Tokenizer(
            {letter: token for token, letter in enumerate(vocabulary)},
            model_max_length=MAX_TOKENS,
            padding_side="right",
            model_input_names=["input_ids"],
        ).save_pretrained(folder)
    vision = config.vision_config
    names = IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type]
    size = getattr(vision, "image_size", 32)
    square = {"height": size, "width": size}
    options = {"size": square, "crop_size": square, "patch_size": vision.patch_size}
    get_image_processor_class_from_name(names["pil"])(**options).save_pretrained(folder)


def save_embedder(folder: Path) -> Path:
    """Save a BERT with mean pooling."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_random(
        BertModel(BertConfig(vocab_size=VOCABULARY, intermediate_size=128, **sizes)), folder
    )
    save_tokenizer(folder, [_SEGMENTS])
    _save_pooling(folder, 64)
    return folder
