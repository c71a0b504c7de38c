"""Texts for tests of tokenizers and models: ordinary, odd, hostile, and very long."""

import random

from tests.support.checkpoints import corpus

ODD_TEXTS = [
    "",
    " ",
    "   \t\n  ",
    "\u3000\u00a0\u2003",
    "a",
    "Z",
    "é",
    "é",
    "字",
    "👍",
    "👨\u200d👩\u200d👧\u200d👦 family \U0001f3f3\ufe0f\u200d\U0001f308",
    "❤️🇩🇪🇫🇷",
    "مرحبا بالعالم، هذا اختبار البحث",
    "שלום עולם \u200fחיפוש\u200e mixed left",
    "\u202eright to left override\u202c",
    "检索向量模型世界。這是一個測試",
    "検索の言葉を調べる。ｶﾀｶﾅ ＡＢＣ",
    "검색 벡터 모델",
    "жизнь слово поиск ёЁ",
    "हिन्दी खोज परीक्षण",
    "ไทยไม่มีช่องว่าง",
    "\x00\x01\x02 control \x1b[31m \x7f\x85",
    "tab\tnew\nline\r\nreturn\x0b\x0c",
    "\ufeffbyte order mark \ufffd replacement",
    "\u200bzero\u200bwidth\u200b \u2060 joiner",
    "z\u0351\u036b\u0343a\u0328l\u0321g\u0322o\u0323",
    "search " * 40,
    "search search hybrid search hybrid",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "xylophone quizzical jazz ξενοδοχείο ☃ ⌘ ∮",
    "<s> hybrid </s> <pad> <unk> <mask> vector",
    "</s></s></s>",
    "<mask>",
    '{"json": [1, 2, {"a": null}]} <b>html</b> & \'quotes\' \\ back',
    "1234567890 3.14159 1e-10 ½ ² Ⅷ",
    "https://example.org/a?b=c&d=e#f user@example.org",
    "ﬁ ﬂ ﬃ ① ㎏ ℡ ™",
    "İstanbul ıssız ſharp ẞ ß",
    "\U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522",
    "\U0010ffff\ue000 private",
    "-" * 300,
    "." * 100,
    "▁▁ underscore of the tokenizer ▁search",
]


def varied_texts(count: int, seed: int = 7) -> list[str]:
    """Return `count` texts: the odd ones, then random ones of 1 to 300 words."""
    rng = random.Random(seed)
    sentences = corpus(400, seed)
    texts = list(ODD_TEXTS)
    while len(texts) < count:
        texts.append(" ".join(rng.choices(sentences, k=rng.choice([1, 1, 1, 2, 3, 6, 20]))))
    return texts[:count]
