"""Texts of many kinds, on which the size of a model's states is measured for quantization.

They decide how fine the steps of each channel are, never what is right.
"""

from app.engine.types import TokenIds
from app.models.text.tokenizer import TextTokenizer

_TEXTS = (
    "",
    "Hybrid search joins dense vectors with lexical weights.",
    "Which harbour towns had a lighthouse before 1850, and who paid the keepers?",
    (
        "The committee met twice. It approved the budget, postponed the vote on the new library, "
        "and asked for a report on the state of the bridges before the frost; nobody objected."
    ),
    "Der Zug nach Hamburg fährt heute von Gleis sieben, voraussichtlich zwölf Minuten später.",
    "La rivière traverse trois villages avant de rejoindre la mer, près d'un vieux moulin.",
    "El horno debe estar muy caliente; el pan se cuece en unos treinta y cinco minutos.",
    "Весной река выходит из берегов, и дорога к мельнице закрыта до мая.",
    "图书馆周一闭馆, 其他日子从早上九点开到晚上八点。",
    "駅から博物館までは歩いて十分ほどです。",
    "تفتح المكتبة أبوابها كل يوم ما عدا يوم الجمعة.",
    "पहाड़ों में सर्दी जल्दी आती है और देर तक रहती है।",
    "def area(width: float, height: float) -> float:\n    return width * height  # in metres",
    "https://example.org/a/b?page=3&sort=desc  user@example.org  +49 30 1234567  3.14159e-10",
    "WARNING!!! READ THIS FIRST ... !!! ??? --- *** $$$ %%% (((( ))))",
    "ok",
    "the the the the the the the the the the the the the the the the the the the the",
    "🙂 🚲 🌧️ ☕",
)


def calibration_sequences(tokenizer: TextTokenizer) -> list[TokenIds]:
    """The texts as token ids."""
    return [text.ids for text in tokenizer.encode(list(_TEXTS))]
