"""Draws pictures of all formats, modes and sizes, and requests for models that read them.

The server's default model reads pages and ranks them by late interaction. Beside it are a model of
texts and pictures, and a classifier of tokens.
"""

import json
import random
from pathlib import Path

from PIL import Image

from tests.oracle.cases import MALFORMED, Body, Case, Malformed, draw_text, log_uniform
from tests.support.classifiers import save_token_classifier
from tests.support.pictures import (
    data_url,
    draw_picture,
    save_image_text,
    save_pages,
    save_picture,
)

_KINDS = [
    *(("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
    *(("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
    *(("WEBP", mode) for mode in ("RGB", "RGBA")),
    *(("GIF", mode) for mode in ("P", "L")),
]
_MOST_PIXELS, _MOST_ASPECT = 200, 20
_ORIENTATION = 0x0112
_DISTINCT, _MOST_INPUTS, _MOST_WORDS = 40, 12, 60
_PATHS = ("/embeddings/", "/embeddings/", "/rerank", "/extract")
_AGGREGATIONS = ("none", "simple", "first", "average", "max")
_CLIP = "clip"


def save_pictures(folder: Path) -> Path:
    """Save the checkpoints, and a file for MODELS; the default model lies in `pages`."""
    folder.mkdir()
    save_pages(folder / "pages", "colqwen2")
    clip = save_image_text(folder / _CLIP, "clip")
    classifier = save_token_classifier(folder / "classifier", "Bert")
    models = folder / "models.yaml"
    models.write_text(f"- name: {clip}\n- name: {classifier}\n  task: extract\n", "utf-8")
    return folder


def draw_url(rng: random.Random, format_: str, mode: str) -> str:
    """Draw a picture of 1 to 200 x 200 pixels, which its EXIF may turn."""
    width = rng.randint(1, _MOST_PIXELS)
    height = rng.randint(-(-width // _MOST_ASPECT), min(_MOST_PIXELS, _MOST_ASPECT * width))
    picture = draw_picture(width, height, seed=rng.randrange(2**32))
    if mode == "I;16":
        picture = picture.convert("L")
    exif = Image.Exif()
    exif[_ORIENTATION] = rng.randint(1, 8)
    file = save_picture(picture.convert(mode), format_, exif=exif)
    return data_url(file, f"image/{format_.lower()}")


def draw_urls(seed: int, count: int) -> list[str]:
    """Draw pictures of all kinds as data URLs."""
    rng = random.Random(seed)
    return [draw_url(rng, *kind) for kind in rng.choices(_KINDS, k=count)]


# transformers makes nearly all pixels of a picture with 16 bits white, so none is here.
_COMPARED = (("PNG", "LA"), ("JPEG", "CMYK"), ("WEBP", "RGBA"), ("GIF", "P"))
PICTURES = [draw_url(random.Random(seed), *kind) for seed, kind in enumerate(_COMPARED)]
_NOISE = draw_picture(90, 60)
_CUT = data_url(save_picture(_NOISE, "JPEG")[:-900], "image/jpeg")
_WRONG = [
    _CUT,
    _CUT.replace("/9j/", "AAAA"),
    data_url(save_picture(Image.new("1", (100, 4)))),
    data_url(save_picture(Image.new("1", (9000, 9000)))),
    data_url(save_picture(_NOISE, "GIF", save_all=True, append_images=[_NOISE.rotate(9)])),
    data_url(b"<svg/>", "image/svg+xml"),
    "data:image/png;base64,AA-_",
    "https://example.com/a.png",
    "",
]
MALFORMED_PICTURES = (
    *MALFORMED,
    *(
        Malformed(path, json.dumps(body).encode(), 422)
        for url in _WRONG
        for path, body in (
            ("/embeddings/", {"model": _CLIP, "sentences": ["a", {"image": url}]}),
            ("/embeddings/", {"sentences": [{"image": PICTURES[0]}, {"image": url}]}),
            ("/rerank", {"query": "a", "passages": [{"image": url}]}),
        )
    ),
    Malformed("/rerank", b'{"query":"a","passages":["a page is no text"]}', 422),
    Malformed("/extract", b'{"texts":["a"],"labels":["nothing"]}', 422),
)


def draw_pictures(seed: int, count: int) -> list[Case]:
    """Draw `count` requests: to embed texts and pictures, to rank pages and to find spans."""
    rng = random.Random(seed)
    pictures: list[object] = [{"image": url} for url in draw_urls(seed, _DISTINCT)]
    texts = [draw_text(rng, log_uniform(rng, _MOST_WORDS)) for _ in range(_DISTINCT)]
    return [_draw_case(rng, number, texts, pictures) for number in range(count)]


def _draw_case(rng: random.Random, number: int, texts: list[str], pictures: list[object]) -> Case:
    size, path = log_uniform(rng, _MOST_INPUTS), rng.choice(_PATHS)
    if path == "/rerank":
        body: Body = {"query": rng.choice(texts), "passages": rng.choices(pictures, k=size)}
    elif path == "/extract":
        body = {"texts": rng.choices(texts, k=size), "aggregation": rng.choice(_AGGREGATIONS)}
    else:
        body = {"sentences": rng.choices([*texts, *pictures], k=size)}
        if rng.choice([True, False]):
            body |= {"model": _CLIP, "normalize_dense": rng.choice([True, False])}
    return Case(number, path, body)
