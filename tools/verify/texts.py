"""Texts that parity is shown on: several scripts and lengths, and a few oddities."""

QUERY = "How do I combine keyword search with semantic search?"

_SENTENCES = [
    "Hybrid search joins the exact words of a query with its meaning in one ranking.",
    "Dense Vektoren tragen die Bedeutung, spärliche die Wörter, die wirklich dastehen.",
    "Le moteur calcule trois sortes de vecteurs en un seul passage.",
    "La búsqueda léxica encuentra nombres propios y números de pieza.",
    "検索エンジンは質問に合う文書を探します。",
    "混合检索把关键词和语义结合起来。",
    "Поиск по смыслу находит то, что сказано другими словами.",
    "البحث الهجين يجمع بين الكلمات والمعنى.",
    "חיפוש היברידי משלב מילים ומשמעות.",
    "Bake the bread at 230 °C for 35 minutes, then let it cool on a rack.",
]
TEXTS = [
    *_SENTENCES,
    "",
    "a",
    "👩\u200d💻 writes tests 🙂",
    "search search search hybrid search",
    " ".join(_SENTENCES),
    " ".join(_SENTENCES * 4),
    " ".join(_SENTENCES * 12),
]
PASSAGES = [*_SENTENCES, " ".join(_SENTENCES), " ".join(_SENTENCES * 8)]
