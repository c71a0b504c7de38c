"""Reads pictures: limits, decoding by Pillow, and the arrays of transformers' image processor.

Policy:
- A picture is decoded only if its header names a known format, one frame, and no more pixels than
  fit the memory of its request.
- The pictures of a request are decoded one after the other, on a thread for pictures, so that it
  holds one decoded picture, and texts do not wait.
- The arrays for the model are what remains: they are reserved with the response before the forward,
  in which a picture counts as its tokens.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
import transformers
from PIL import Image, ImageChops, ImageOps, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension, SizeDict
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from smart_embedder.errors import InvalidRequestError, StartupError, one_line
from smart_embedder.interrupts import stop_if_given_up
from smart_embedder.models.files.config import read_config
from smart_embedder.requests import ImageInput

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 2**26
# The most bytes of a PNG's texts, which are compressed; by default Pillow allows 64 MiB.
_MAX_TEXT_BYTES = 2**22
# A scan of a JPEG may have 14 bytes, and libjpeg passes over all pixels for it.
_SCAN, _MAX_SCANS = b"\xff\xda\0", 1000
# Pillow may keep each piece that it reads, and GIF's have at most 255 bytes.
_MAX_READS = 2**18
# Processors enlarge the shorter side of a narrow picture, and the longer one with it.
MAX_ASPECT = 20
# Bytes of a pixel in Pillow: in RGB and, unless they are as many, in other modes.
# Pictures of 16 bits are copied once before.
_RGB, _OF_MODE = 4, {"1": 1, "L": 1, "P": 1, "I;16": 2 * 2}
# libjpeg holds the coefficients of several scans, and libwebp its canvas three times.
_PROGRESSIVE, _WEBP = 6, 12
# A copy of the pixels in NumPy, and one in Pillow to resize it.
_COPIED = 7
# Copies in float32 of the pixels of patches, which Qwen's processor repeats as a video's.
_PATCHED = 60
# Copies in float32 of a picture that OWLv2's processor pads to a square before it resizes it.
_PADDED = 28
# Copies in bytes of the pixels of tiles, and of what they are cut from.
_TILED = 10
# A copy in RGBA and its opacity, of a picture with a transparent color.
_WHITENED = _RGB + 1
_ORIENTATION = 0x0112
_PROBE_SIZE = 70, 40

Arrays = dict[str, npt.NDArray[Any]]


class ImageReader:
    """Turns pictures into the arrays that a model reads, by the processor in its folder.

    `description` identifies everything that decides which arrays a picture has.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `StartupError` if the folder has no processor that works with Pillow."""
        configure_pillow()
        try:
            self._processor: Any = self._load(folder)
        except Exception as error:
            raise StartupError(
                f"transformers {transformers.__version__} cannot load the image processor in "
                f"{folder} without torchvision: {one_line(error):.300}"
            ) from error
        if getattr(self._processor, "backend", None) != "pil":
            raise StartupError(
                f"the image processor in {folder} needs torchvision, which is not used here"
            )
        options = self._processor.to_dict().items()
        self.description = sorted((name, repr(value)) for name, value in options)
        try:
            self._on_pillow = self._try_pillow()
        except Exception as error:
            raise StartupError(
                f"the processor in {folder} cannot read a picture: {one_line(error):.300}"
            ) from error

    def _load(self, folder: Path) -> Any:
        """Load the processor, and return its part for pictures."""
        return AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )

    def _make_arrays(self, processor: Any, picture: Image.Image, _: str = "") -> Arrays:
        """Make the arrays with the processor for pictures, or with a changed copy."""
        return dict(processor(images=picture, return_tensors="np"))

    def read(self, image: ImageInput, held: int = 0, prompt: str = "") -> Arrays:
        """Decode and process one picture, beside `held` bytes of its request's others.

        Only a `MessageReader` reads the `prompt`. Safe to call from several threads. Raises
        `InvalidRequestError` for a file that is no picture, is damaged, or exceeds a limit.
        """
        stop_if_given_up()
        picture = decode(image, held, self._count_bytes)
        if "transparency" in picture.info and self._processor.do_convert_rgb:
            _whiten(picture)
        if self._on_pillow is not None:
            # Some processors need an array where they do not resize, as of small pictures.
            with suppress(Exception):
                return self._make_arrays(self._on_pillow, picture, prompt)
        try:
            return self._make_arrays(self._processor, picture, prompt)
        except MemoryError:
            raise
        except Exception as error:
            size = f"{picture.width} x {picture.height}"
            raise InvalidRequestError(
                f"the model cannot read a picture of {size} pixels: {one_line(error):.200}"
            ) from error

    def _count_bytes(self, width: int, height: int) -> int:
        """Return the bytes that processing takes besides the decoded picture.

        Not counted are arrays that have one size for any picture, as those of most processors.
        """
        processor = self._processor
        size = _COPIED * width * height if self._on_pillow is None else 0
        if hasattr(processor, "merge_size"):  # The arrays of Qwen's grow with the picture.
            patches = processor.get_number_of_image_patches(height, width)
            size += _PATCHED * int(patches * processor.patch_size**2)
        elif hasattr(processor, "max_image_size"):  # ColModernVBERT enlarges small pictures.
            tiles, *_ = processor.get_number_of_image_patches(height, width)
            size += _TILED * tiles * processor.max_image_size["longest_edge"] ** 2
        elif getattr(processor, "do_pad", False):
            size += _PADDED * max(width, height) ** 2
        return size

    def _try_pillow(self) -> Any:
        """Return a copy of the processor that resizes Pillow's picture, or None if it cannot.

        The processor itself copies the whole picture to NumPy first, and then back to Pillow.
        """
        probe = Image.open(BytesIO(make_probe().read()))
        changed = copy(self._processor)
        changed.process_image, changed.resize = _keep, partial(_resize, self._processor)
        expected = self._make_arrays(self._processor, probe)
        with suppress(Exception):
            arrays = self._make_arrays(changed, probe)
            if all(np.array_equal(arrays[name], expected[name]) for name in expected):
                return changed
        return None


class PageReader(ImageReader):
    """Turns pictures of pages into arrays, with the token ids around their patches."""

    def _load(self, folder: Path) -> Any:
        self.whole: Any = AutoProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        return self.whole.image_processor

    def _make_arrays(self, processor: Any, picture: Any, _: str = "") -> Arrays:
        whole = copy(self.whole)
        whole.image_processor = processor = copy(processor)
        # ColModernVBERT's tiles have one size, and stay in bytes until the model scales them.
        if has_tiles := hasattr(processor, "max_image_size"):
            processor.do_rescale = processor.do_normalize = processor.do_pad = False
        picture.convert = partial(_dereference, ref(picture))  # Its processor would copy it.
        made = whole.process_images(images=[picture], return_tensors="pt")
        arrays = {name: tensor.numpy() for name, tensor in made.items() if name != "labels"}
        return arrays | self._read_scale() if has_tiles else arrays

    def _read_scale(self) -> Arrays:
        """Return the factor for the bytes of each channel, and what is added then, `[3, 1, 1]`."""
        processor = self._processor
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, deviation = np.zeros(3), np.ones(3)
        if processor.do_normalize:
            mean, deviation = np.array(processor.image_mean), np.array(processor.image_std)
        scale, offset = factor / deviation, -mean / deviation
        arrays = {"pixel_scale": scale, "pixel_offset": offset}
        return {name: array.astype(np.float32)[:, None, None] for name, array in arrays.items()}


class MessageReader(ImageReader):
    """Turns a picture into arrays, with the token ids of the chat's message that holds it.

    `options` are variables of the chat template.
    """

    def __init__(self, folder: Path, options: Iterable[tuple[str, Any]]) -> None:
        self._options = dict(options)
        super().__init__(folder)
        self.description += [("chat_template", repr((self._whole.chat_template, self._options)))]

    def _load(self, folder: Path) -> Any:
        """Load the whole processor but its parts for video and sound: one needs torchvision."""
        processor = super()._load(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        parts = {"image_processor": processor, "tokenizer": tokenizer}
        base = getattr(transformers, PROCESSOR_MAPPING_NAMES[read_config(folder)["model_type"]])
        # transformers would refuse None in place of a part.
        accepting: Any = {"check_argument_for_proper_class": lambda *_: None}
        kind: Any = type(base.__name__, (base,), accepting)
        values, _ = kind.get_processor_dict(folder, local_files_only=True)
        arguments = map(parts.get, kind.get_attributes())
        self._whole: Any = kind.from_args_and_dict([*arguments], values)
        return processor

    def _make_arrays(self, processor: Any, picture: Any, prompt: str = "") -> Arrays:
        whole, kind = copy(self._whole), "text" if isinstance(picture, str) else "image"
        whole.image_processor = processor
        messages = [{"role": "user", "content": [{"type": kind, kind: picture}]}]
        if prompt:
            system = {"role": "system", "content": [{"type": "text", "text": prompt}]}
            messages.insert(0, system)
        made = whole.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="np", **self._options
        )
        return {name: array for name, array in made.items() if name != "attention_mask"}

    def read_text(self, text: str, prompt: str) -> npt.NDArray[Any]:
        """Return the token ids, `[tokens]`, of a message with a text."""
        return np.asarray(self._make_arrays(None, text, prompt)["input_ids"][0])


def configure_pillow() -> None:
    """Set Pillow's limits for this process, which has loaded a model that reads pictures."""
    # `decode` checks the pixels before Pillow decodes any; Pillow's own limit only warns.
    Image.MAX_IMAGE_PIXELS = None
    PngImagePlugin.MAX_TEXT_MEMORY = _MAX_TEXT_BYTES
    # Pillow warns of each damaged EXIF, so clients would write lines into the log.
    warnings.filterwarnings("ignore", module="PIL")


def _dereference(picture: "ref[Image.Image]", *_: object) -> Image.Image | None:
    return picture()


def make_probe() -> ImageInput:
    """Make a picture to try a processor and a model with."""
    pixels = np.arange(3 * _PROBE_SIZE[0] * _PROBE_SIZE[1], dtype=np.uint32) * 7 % 256
    file = BytesIO()
    Image.frombytes("RGB", _PROBE_SIZE, pixels.astype(np.uint8).tobytes()).save(file, "PNG")
    return ImageInput(file.getvalue())


def _keep(picture: Any, **_: object) -> Any:
    """Stand in for a processor's conversion to NumPy: give Pillow's picture an array's shape."""
    picture.shape = (3, picture.height, picture.width)
    picture.ndim = 3
    return picture


def _resize(processor: Any, image: Any, size: SizeDict, **options: Any) -> Any:
    """Resize as the processor does; transformers swaps the sides of Pillow's pictures."""
    if isinstance(image, Image.Image) and size.shortest_edge and not size.longest_edge:
        shape = np.broadcast_to(np.uint8(0), (3, image.height, image.width))
        height, width = get_resize_output_image_size(
            shape,
            size.shortest_edge,
            default_to_square=False,
            input_data_format=ChannelDimension.FIRST,
        )
        size = SizeDict(height=height, width=width)
    return processor.resize(image=image, size=size, **options)


def decode(
    image: ImageInput, held: int = 0, processing: Callable[[int, int], int] = lambda *_: 0
) -> Image.Image:
    """Decode a picture, upright and in RGB, as `load_image` of transformers does.

    Of gray pictures with 16 bits it keeps the higher 8, where `load_image` makes nearly all pixels
    white. The request holds `held` bytes of other pictures, and `processing` of the sides of this
    one is the number of bytes that are used later. `configure_pillow` must have been called. Raises
    `InvalidRequestError` before anything is decoded if a limit is exceeded, and for a file that is
    no picture or is damaged.
    """
    try:
        content = image.read()
        with _open(content) as picture:
            _check_limits(picture, image, held, processing)
            picture.load()
            # The orientation of a PNG may follow its pixels.
            _check_limits(picture, image, held, processing)
            ImageOps.exif_transpose(picture, in_place=True)
            if picture.mode == "I;16":  # Keep the higher bits, as Pillow does of other modes.
                return picture.point(lambda value: value * (1 / 256)).convert("RGB")
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except (InvalidRequestError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise InvalidRequestError(
            f"the picture is none of {', '.join(FORMATS)}, or its file is damaged"
        ) from None
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of many types
        message = f"the picture's file is damaged: {one_line(error):.200}"
        raise InvalidRequestError(message) from None


class _File(BytesIO):
    """A file in memory that is read in at most `_MAX_READS` pieces."""

    _reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes; raises `InvalidRequestError` after too many calls."""
        self._reads += 1
        if self._reads > _MAX_READS:
            raise InvalidRequestError("the picture's file has too many small parts: save it again")
        return super().read(size)


def _open(content: bytes) -> Image.Image:
    """Open a file; behind a phone's JPEG may be further pictures, which are not read.

    Raises `InvalidRequestError` for a JPEG with more than `_MAX_SCANS` scans.
    """
    file = _File(content)
    if not content.startswith(b"\xff\xd8\xff"):
        return Image.open(file, formats=FORMATS)
    if (scans := content.count(_SCAN)) > _MAX_SCANS:
        raise InvalidRequestError(
            f"the picture has {scans} scans, and at most {_MAX_SCANS} are allowed: save it again"
        )
    jpeg = JpegImagePlugin.JpegImageFile(file)
    first_scan = content.rfind(_SCAN, 0, file.tell())
    if content[first_scan + 4] < jpeg.layers:  # It holds some of the components.
        jpeg.info["progressive"] = 1
    return jpeg


def _whiten(picture: Image.Image) -> None:
    """Make the pixels of the transparent color white, as processors of transformers do."""
    opacity = picture.convert("RGBA").getchannel("A")
    picture.paste("white", None, ImageChops.invert(opacity))
    del picture.info["transparency"]


def _check_limits(
    picture: Image.Image, image: ImageInput, held: int, processing: Callable[[int, int], int]
) -> None:
    """Raise `InvalidRequestError` for a picture that should not be decoded."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise InvalidRequestError(
            f"the picture has {width} x {height} pixels, and at most {MAX_PIXELS} are allowed: "
            "send a smaller one"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidRequestError(
            f"the picture has {width} x {height} pixels, and one side may be at most {MAX_ASPECT} "
            "times as long as the other: cut it"
        )
    if getattr(picture, "is_animated", False):
        raise InvalidRequestError("the picture has several frames: send one of them")
    stored = _OF_MODE.get(picture.mode, _RGB)
    per_pixel = max(stored, _RGB)
    # Pillow would decode a PNG here to find an orientation behind its pixels.
    is_known = picture.format != "PNG" or "exif" in picture.info
    if is_known and picture.getexif().get(_ORIENTATION, 1) != 1:
        per_pixel = max(per_pixel, 2 * stored)
    if picture.mode != "RGB":
        per_pixel = max(per_pixel, stored + _RGB)
    per_pixel += _PROGRESSIVE if "progressive" in picture.info else 0
    per_pixel += _WEBP if picture.format == "WEBP" else 0
    later = (_RGB + _WHITENED * ("transparency" in picture.info)) * width * height
    later += processing(width, height)
    size = held + max(per_pixel * width * height, later)
    image.memory.check_image(size, f"a picture of {width} x {height} pixels and those before it")
