"""Decoding of pictures: what Pillow reads, and the limits that are checked before it decodes."""

import struct
import tracemalloc
import zlib
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.owlv2.image_processing_pil_owlv2 import Owlv2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.models.images import ImageReader, configure_pillow, decode
from smart_embedder.requests import AnswerMemory, ImageInput
from tests.support.pictures import data_url, draw_picture, save_picture


@pytest.fixture(scope="module", autouse=True)
def _pillow() -> None:
    configure_pillow()


PICTURE = draw_picture(60, 40)


def chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header names a size, and which holds nearly nothing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9))
    return b"\x89PNG\r\n\x1a\n" + content + chunk(b"IEND", b"")


def lying_png() -> bytes:
    png = save_picture(PICTURE)
    return png[:33] + struct.pack(">I", 5) + png[37:]


def frames(format_: str) -> bytes:
    pictures = [draw_picture(8, 8, seed) for seed in range(3)]
    return save_picture(pictures[0], format_, save_all=True, append_images=pictures[1:])


def png_with_texts(count: int) -> bytes:
    """A PNG with compressed texts of a million letters each."""
    png = save_picture(PICTURE)
    texts = chunk(b"zTXt", b"note\0\0" + zlib.compress(b"a" * 10**6)) * count
    return png[:33] + texts + png[33:]


def gif_with_comment(length: int) -> bytes:
    gif = save_picture(PICTURE, "GIF")
    begin = len(b"GIF89a") + 7 + 3 * 256
    return gif[:begin] + b"!\xfe" + b"\1a" * length + b"\0" + gif[begin:]


def split_scans(repeats: int = 1) -> bytes:
    """A JPEG that is not progressive, with three equal components in scans of their own."""
    gray = save_picture(PICTURE.convert("L"), "JPEG")
    frame, scan = gray.index(b"\xff\xc0"), gray.index(b"\xff\xda")
    frames = b"\xff\xc0\0\x11" + gray[frame + 4 : frame + 9] + b"\3\1\x11\0\2\x11\0\3\x11\0"
    scans = [
        b"\xff\xda\0\x08\1%c\0\0\x3f\0" % number + gray[scan + 10 : -2] for number in (1, 2, 3)
    ]
    return gray[:frame] + frames + gray[frame + 13 : scan] + b"".join(scans) * repeats + gray[-2:]


UNUSABLE = {
    "bomb": (png_of(60_000, 60_000), "60000 x 60000 pixels, and at most 67108864 are allowed"),
    "narrow": (png_of(60_000, 3), "60000 x 3 pixels, and one side may be at most 20 times as long"),
    "frames of a GIF": (frames("GIF"), "the picture has several frames: send one of them"),
    "frames of a PNG": (frames("PNG"), "the picture has several frames: send one of them"),
    "frames of a WebP": (frames("WEBP"), "the picture has several frames: send one of them"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG, JPEG, WEBP, GIF"),
    "BMP": (save_picture(PICTURE, "BMP"), "none of PNG, JPEG, WEBP, GIF"),
    "nothing": (b"", "none of PNG, JPEG, WEBP, GIF"),
    "truncated": (save_picture(PICTURE, "JPEG")[:900], "is damaged: image file is truncated"),
    "lying chunk": (lying_png(), "the picture's file is damaged"),
    "no pixels": (png_of(60, 40), "the picture's file is damaged"),
    "many scans": (split_scans(400), "the picture has 1200 scans, and at most 1000 are allowed"),
    "empty parts of a JPEG": (b"\xff\xd8" + b"\xff\xfe\0\2" * 2**17, "has too many small parts"),
    "small parts of a GIF": (
        gif_with_comment(2**17),
        "the picture's file has too many small parts",
    ),
    "long texts": (png_with_texts(5), "the picture's file is damaged: Too much memory used in tex"),
    "no base64": ("data:image/png;base64,!", "the picture is not valid base64"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_file_is_refused_in_one_sentence(case) -> None:
    content, message = UNUSABLE[case]
    with pytest.raises(InvalidRequestError, match=message):
        decode(ImageInput(content))


def save_rotated(picture: Image.Image, format_: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return save_picture(picture, format_, exif=exif)


def move_orientation_behind_pixels(png: bytes) -> bytes:
    """Move the chunk eXIf of a PNG to its end."""
    end, start = png.index(b"IEND") - 4, png.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(png[start : start + 4], "big")
    return png[:start] + png[stop:end] + png[start:stop] + png[end:]


USABLE = {
    "PNG": save_picture(PICTURE),
    "progressive JPEG": save_picture(PICTURE, "JPEG", progressive=True),
    "several scans": split_scans(),
    "WebP": save_picture(PICTURE, "WEBP"),
    "GIF": save_picture(PICTURE, "GIF"),
    "CMYK": save_picture(PICTURE.convert("CMYK"), "JPEG"),
    "transparent": save_picture(PICTURE.convert("RGBA")),
    "one bit": save_picture(PICTURE.convert("1")),
    "one transparent color": save_picture(PICTURE.convert("P"), transparency=9),
    "phone's": save_picture(PICTURE, "MPO", save_all=True, append_images=[draw_picture(8, 8)]),
    "a text": png_with_texts(1),
    "rotated": save_rotated(PICTURE),
    "rotated behind pixels": move_orientation_behind_pixels(save_rotated(PICTURE, "PNG")),
}


@pytest.mark.parametrize("case", USABLE)
def test_a_picture_is_decoded_upright_and_in_rgb(case) -> None:
    content = USABLE[case]
    image = ImageInput(content)
    with Image.open(BytesIO(content)) as picture:
        expected = ImageOps.exif_transpose(picture).convert("RGB")
    assert np.array_equal(decode(image), expected)


def test_a_gray_picture_of_16_bits_keeps_its_higher_bits() -> None:
    pixels = np.arange(0, 2**16, 2**16 // 2400, dtype=np.uint16)[:2400].reshape(40, 60)
    image = ImageInput(save_picture(Image.fromarray(pixels)))
    assert np.array_equal(decode(image), np.repeat(pixels[..., None] // 256, 3, axis=-1))


def test_a_lack_of_memory_is_no_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "load", exhaust)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", exhaust)
    with pytest.raises(MemoryError):
        decode(ImageInput(USABLE["PNG"]))


def test_base64_with_line_breaks_is_read() -> None:
    url = data_url(save_picture(PICTURE))
    broken = "\r\n".join(url[start : start + 76] for start in range(0, len(url), 76))
    assert np.array_equal(decode(ImageInput(broken)), PICTURE)


def test_base64_with_a_space_between_all_letters_takes_little_memory() -> None:
    image = ImageInput("Q Q " * 2**18)
    tracemalloc.start()
    try:
        assert len(image.read()) == 3 * 2**17
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 4 * len(image)


@pytest.mark.parametrize(
    ("case", "per_pixel"),
    [
        ("PNG", 4),
        ("transparent", 8),
        ("one bit", 5),
        ("one transparent color", 9),
        ("rotated", 8),
        ("rotated behind pixels", 8),
        ("progressive JPEG", 10),
        ("several scans", 10),
        ("WebP", 16),
    ],
)
def test_memory_is_checked_before_decoding(case, per_pixel) -> None:
    content, needed = USABLE[case], 5 + per_pixel * 60 * 40
    decode(ImageInput(content, AnswerMemory(needed)), held=5)
    with pytest.raises(InvalidRequestError, match=f"60 x 40 pixels .* need {needed} bytes, and"):
        decode(ImageInput(content, AnswerMemory(needed - 1)), held=5)


def test_a_png_beyond_the_memory_is_refused_before_its_pixels_are_read() -> None:
    content = png_of(8000, 8000)  # It has no pixels, so reading them would fail.
    with pytest.raises(InvalidRequestError, match="8000 x 8000 pixels .* need 256000000 bytes"):
        decode(ImageInput(content, AnswerMemory(1000)))


@pytest.mark.parametrize("processor", [CLIPImageProcessorPil, Gemma4ImageProcessorPil])
@pytest.mark.parametrize("size", [(500, 300), (33, 200), (1, 1), (336, 768)])
def test_the_reader_makes_the_arrays_of_the_processor(processor, size, tmp_path: Path) -> None:
    processor().save_pretrained(tmp_path)
    picture = draw_picture(*size)
    arrays = ImageReader(tmp_path).read(ImageInput(save_picture(picture)))
    expected = processor()(images=picture, return_tensors="np")
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, expected[name])


@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize(("mode", "format_"), [("P", "PNG"), ("P", "GIF"), ("L", "PNG")])
def test_a_transparent_color_is_white_as_in_transformers(mode, format_, converts, tmp_path) -> None:
    processor = CLIPImageProcessorPil(do_convert_rgb=converts)
    processor.save_pretrained(tmp_path)
    picture = PICTURE.convert(mode)
    content = save_picture(picture, format_, transparency=picture.getpixel((5, 5)))
    arrays = ImageReader(tmp_path).read(ImageInput(content))
    loaded = load_image(b64encode(content).decode())
    expected = processor(images=loaded, return_tensors="np")
    assert np.array_equal(arrays["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(
    ("processor", "of_arrays"),
    [
        (Qwen2VLImageProcessorPil(patch_size=8), 60 * 80 * 48),
        (Owlv2ImageProcessorPil(size={"height": 32, "width": 32}), 7 * 60 * 40 + 28 * 60**2),
        (
            Idefics3ImageProcessorPil(
                size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
            ),
            10 * 5 * 32**2,
        ),
    ],
)
def test_memory_of_arrays_is_checked_before_decoding(processor, of_arrays, tmp_path) -> None:
    processor.save_pretrained(tmp_path)
    reader, content = ImageReader(tmp_path), USABLE["PNG"]
    needed = 4 * 60 * 40 + of_arrays
    reader.read(ImageInput(content, AnswerMemory(needed)))
    with pytest.raises(InvalidRequestError, match=f"60 x 40 pixels .* need {needed} bytes, and"):
        reader.read(ImageInput(content, AnswerMemory(needed - 1)))


def test_damaged_exif_is_no_warning(tmp_path: Path) -> None:
    CLIPImageProcessorPil().save_pretrained(tmp_path)
    exif = Image.Exif()
    exif[0x010E] = "a description"
    content = save_picture(PICTURE, "JPEG", exif=exif)
    length = struct.pack(">HHI", 0x010E, 2, len("a description") + 1)
    assert length in content
    damaged = content.replace(length, length[:4] + b"\0\0\xff\xff")
    assert ImageReader(tmp_path).read(ImageInput(damaged)).keys() == {"pixel_values"}


def test_an_image_processor_that_needs_torchvision_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "VivitImageProcessor"}'
    )
    with pytest.raises(StartupError, match="image processor in .* torchvision"):
        ImageReader(tmp_path)
