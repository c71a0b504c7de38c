"""Random pictures, and tiny checkpoints of models that read them."""

import json
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, processors, trainers
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from smart_embedder.requests import ImageInput
from tests.support.checkpoints import corpus, save_byte_level_tokenizer, spread_weights
from tests.support.encoders import save_modules, save_tokenizer, word_tokenizer
from tests.support.wordpiece import change

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


# Of each family the text of a picture in its template.
_GEMMA_IMAGE, _QWEN_IMAGE = "<|image|>", "<|vision_start|><|image_pad|><|vision_end|>"
_GEMMA_TOKENS = {
    "image_token": _GEMMA_IMAGE, "boi_token": "<|image>", "eoi_token": "<image|>",
    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
_PARTS = (
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}{image}"
    "{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}{%- endfor -%}"
)
_GEMMA_TEMPLATE = "{%- for message in messages -%}" + _PARTS + "{%- endfor -%}"
_QWEN_TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\nRepresent it.<|im_end|>\n' }}"
    "{%- endif -%}{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    + _PARTS
    + "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


def save_messages(folder: Path, family: str) -> Path:
    """Save a random checkpoint of one of `MESSAGES`, with the files of sentence-transformers."""
    torch.manual_seed(9)
    width = MESSAGES[family](folder)
    spread_weights(folder)
    is_qwen = family == "qwen3_vl"
    pooling = {"embedding_dimension": width, "pooling_mode": "lasttoken" if is_qwen else "mean"}
    save_modules(folder, pooling, [("Normalize", {}, None)], prompts={"prompts": PROMPTS})
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities: dict[str, Any] = dict.fromkeys(("text", "image", "video"), forward)
    texts = {
        "transformer_task": "feature-extraction",
        "modality_config": modalities | {"message": forward | {"format": "structured"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}} if is_qwen else {},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(texts))
    return folder


def _save_embedding_gemma2(folder: Path) -> int:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *_GEMMA_TOKENS.values()]
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    bpe.train_from_iterator(corpus(400), trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = transformers.GemmaTokenizer(
        vocab=model["vocab"],
        merges=list(map(tuple, model["merges"])),
        add_bos_token=True,
        add_eos_token=True,
        extra_special_tokens=_GEMMA_TOKENS,
        chat_template=_GEMMA_TEMPLATE.replace("{image}", _GEMMA_IMAGE),
    )
    tokenizer.save_pretrained(folder)
    text = transformers.EmbeddingGemma2TextConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=16,
        hidden_size_per_layer_input=32, embedding_dim=48,
        per_layer_config={5: {"head_dim": 32, "num_key_value_heads": 1}},
    )  # fmt: skip
    vision = transformers.Gemma4VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, position_embedding_size=64, patch_size=4,
        pooling_kernel_size=2,
    )  # fmt: skip
    audio = transformers.Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=32
    )
    config = transformers.EmbeddingGemma2Config(
        text_config=text, vision_config=vision, audio_config=audio,
        image_token_id=tokenizer.image_token_id, audio_token_id=tokenizer.audio_token_id,
    )  # fmt: skip
    transformers.EmbeddingGemma2Model(config).save_pretrained(folder)
    processor = get_image_processor_class_from_name("Gemma4ImageProcessorPil")(
        max_soft_tokens=70, patch_size=4, pooling_kernel_size=2
    )
    values = processor.to_dict() | {"image_processor_type": "Gemma4ImageProcessor"}
    named = {"processor_class": "EmbeddingGemma2Processor", "image_processor": values}
    (folder / "processor_config.json").write_text(json.dumps(named))
    return 48


def _save_qwen3_vl(folder: Path) -> int:
    size = save_byte_level_tokenizer(folder, ("yes", "no"), template_adds_end=True)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = _QWEN_TEMPLATE.replace("{image}", _QWEN_IMAGE)
    tokenizer.save_pretrained(folder)
    image, video, begin, end = map(tokenizer.convert_tokens_to_ids, names)
    rotary = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    config = transformers.Qwen3VLConfig(
        text_config=_PAGE_TEXTS | {"vocab_size": size + len(names), "rope_parameters": rotary},
        vision_config={
            "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
            "out_hidden_size": 64, "patch_size": 8, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    get_image_processor_class_from_name("Qwen2VLImageProcessorPil")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 16_384}
    ).save_pretrained(folder)
    named = {"image_processor_type": "Qwen2VLImageProcessorFast"}
    change(folder / "preprocessor_config.json", processor_class="Qwen3VLProcessor", **named)
    return 64


MESSAGES: dict[str, Callable[[Path], int]] = {
    "embedding_gemma2": _save_embedding_gemma2,
    "qwen3_vl": _save_qwen3_vl,
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
