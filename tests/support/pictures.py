"""Random pictures, and tiny checkpoints of models that read them."""

from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import processors
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from smart_embedder.requests import ImageInput
from tests.support.encoders import save_tokenizer, word_tokenizer

POSITIONS = 40
_TEXTS = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 700, "max_position_embeddings": POSITIONS, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
_PIXELS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_SQUARE = {"height": 32, "width": 32}
_CUT = {"size": {"shortest_edge": 32}, "crop_size": _SQUARE}
_WIDTH = {"projection_dim": 24}
_ALTCLIP = {"project_dim": 24, "pad_token_id": 1, "max_position_embeddings": POSITIONS + 2}
_GROUPS = {"depths": [1, 1, 1], "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 2]}

_PAGE_TEXTS = _TEXTS | {
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
# Of each family the classes' name, options of the whole, its texts and its pictures, and the image
# processor with its options.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str, Any]] = {
    "clip": ("CLIP", _WIDTH, {}, {}, "CLIP", _CUT),
    "siglip": ("Siglip", {}, {"projection_size": 32}, {}, "Siglip", {"size": _SQUARE}),
    "siglip2": (
        "Siglip2", {}, {"projection_size": 32}, {"num_patches": 16}, "Siglip2",
        {"patch_size": 8, "max_num_patches": 20},
    ),
    "altclip": ("AltCLIP", _WIDTH, _ALTCLIP, {}, "CLIP", _CUT),
    "chinese_clip": ("ChineseCLIP", _WIDTH, {}, {}, "ChineseCLIP", _CUT),
    "blip": (
        "Blip", _WIDTH | {"image_text_hidden_size": 24}, {"encoder_hidden_size": 32}, {}, "Blip",
        {"size": _SQUARE},
    ),
    "groupvit": (
        "GroupViT", _WIDTH | {"projection_intermediate_dim": 32}, {}, _GROUPS, "CLIP", _CUT,
    ),
    "aimv2": ("Aimv2", _WIDTH, {}, {}, "CLIP", _CUT),
    "owlv2": ("Owlv2", _WIDTH, {}, {}, "Owlv2", {"size": _SQUARE}),
}  # fmt: skip


def save_image_text(folder: Path, family: str) -> Path:
    """Save a random checkpoint of one of `FAMILIES`."""
    name, options, texts, pictures, processor, sizes = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(
        text_config=_TEXTS | texts, vision_config=_PIXELS | pictures, **options
    )
    model = getattr(transformers, f"{name}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    if family == "siglip2":  # transformers always loads its own class of tokenizer.
        _save_letters(folder)
    else:
        save_tokenizer(folder, word_tokenizer())
    get_image_processor_class_from_name(f"{processor}ImageProcessorPil")(**sizes).save_pretrained(
        folder
    )
    return folder


def save_pages(folder: Path, family: str) -> Path:
    """Save a random checkpoint of one of `PAGES`."""
    torch.manual_seed(8)
    model, processor = PAGES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _make_colpali() -> tuple[Any, Any]:
    tokenizer = _add_tokens("<image>")
    config = transformers.PaliGemmaConfig(
        text_config=_PAGE_TEXTS | {"model_type": "gemma", "vocab_size": len(tokenizer)},
        vision_config=_PIXELS | {"model_type": "siglip_vision_model", "projection_dim": 64},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
    )
    processor = get_image_processor_class_from_name("SiglipImageProcessorPil")(size=_SQUARE)
    processor.image_seq_length = 16
    model = transformers.ColPaliForRetrieval(
        transformers.ColPaliConfig(vlm_config=config, embedding_dim=16)
    )
    return model, transformers.ColPaliProcessor(processor, tokenizer)


def _make_colqwen2() -> tuple[Any, Any]:
    names = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = _add_tokens(*names, "<|im_start|>", "<|im_end|>", "<|endoftext|>")
    image, begin, end = map(tokenizer.convert_tokens_to_ids, names)
    rotary = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    config = transformers.Qwen2VLConfig(
        text_config=_PAGE_TEXTS | {"vocab_size": len(tokenizer), "rope_parameters": rotary},
        vision_config={
            "depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 64, "patch_size": 8,
            "mlp_ratio": 2,
        },
        image_token_id=image,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )  # fmt: skip
    processor = get_image_processor_class_from_name("Qwen2VLImageProcessorPil")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}
    )
    model = transformers.ColQwen2ForRetrieval(
        transformers.ColQwen2Config(vlm_config=config, embedding_dim=16)
    )
    return model, transformers.ColQwen2Processor(processor, tokenizer)


def _make_colmodernvbert() -> tuple[Any, Any]:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    names = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    tokenizer = _add_tokens(*names, *places)
    texts = _PAGE_TEXTS | {"vocab_size": len(tokenizer), "local_attention": 16}
    del texts["num_key_value_heads"], texts["head_dim"]
    config = transformers.ModernVBertConfig(
        text_config=texts | {"model_type": "modernbert", "cls_token_id": 2, "sep_token_id": 3},
        vision_config=_PIXELS | {"model_type": "siglip_vision_model"},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pixel_shuffle_factor=2,
    )
    processor = get_image_processor_class_from_name("Idefics3ImageProcessorPil")(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    model = transformers.ColModernVBertForRetrieval(
        transformers.ColModernVBertConfig(vlm_config=config, embedding_dim=16)
    )
    return model, transformers.ColModernVBertProcessor(processor, tokenizer, image_seq_len=4)


PAGES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "colpali": _make_colpali,
    "colqwen2": _make_colqwen2,
    "colmodernvbert": _make_colmodernvbert,
}


def _add_tokens(*tokens: str) -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of words with these special tokens."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(),
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        additional_special_tokens=list(tokens),
    )


def _save_letters(folder: Path) -> None:
    """Save a tokenizer of SigLIP 2's class, which fills texts up on the right, unmasked."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    tokenizer = transformers.Siglip2Tokenizer(
        vocab={word: index for index, word in enumerate([*words, "or"])},
        merges=[("o", "r")],
        model_max_length=POSITIONS,
        padding_side="right",
        model_input_names=["input_ids"],
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer.save_pretrained(folder)


def draw_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Draw a random picture in RGB."""
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))


def save_picture(picture: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    """Return the picture's file."""
    file = BytesIO()
    picture.save(file, format_, **options)
    return file.getvalue()


def input_of(picture: Image.Image) -> ImageInput:
    """Return the picture as an input of the engine."""
    return ImageInput(save_picture(picture))


def data_url(content: bytes, kind: str = "image/png") -> str:
    """Return the data URL of a file."""
    return f"data:{kind};base64,{b64encode(content).decode()}"
