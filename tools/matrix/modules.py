"""Saves a model with each module of sentence-transformers, and computes its vectors with it."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.base.modules import Module
from sentence_transformers.cross_encoder import modules as scores
from sentence_transformers.multi_vector_encoder import modules as tokens
from sentence_transformers.sentence_transformer import modules as dense
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from sentence_transformers.sparse_encoder import modules as sparse
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPConfig,
    CLIPModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tools.matrix.checkpoints import (
    PASSAGES,
    TEXTS,
    NotBuiltError,
    save_image_processor,
    save_random,
    save_tokenizer,
)
from tools.matrix.shrinking import END, VOCABULARY

MODULES = sorted(
    {
        name
        for package in (dense, sparse, tokens, scores)
        for name, found in vars(package).items()
        if inspect.isclass(found) and issubclass(found, Module) and found.__name__ == name
        if not inspect.isabstract(found)
    }
)
_WIDTH = 64
_WORDS = sorted({word for text in TEXTS for word in text.lower().split()})
_SIZES = {"hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"vocab_size": VOCABULARY, "intermediate_size": 128}
_POOLINGS = ["cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
_CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
_ON_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}


class _Parts:
    """The modules that others follow, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer = save_tokenizer(folder / "tokenizer")
        self.pooling = dense.Pooling(_WIDTH)

    def transformer(self, **config: Any) -> dense.Transformer:
        return dense.Transformer(self._save(BertModel(BertConfig(**_SIZES, **config))))

    def mlm(self) -> sparse.MLMTransformer:
        return sparse.MLMTransformer(self._save(BertForMaskedLM(BertConfig(**_SIZES))))

    def causal(self) -> scores.Transformer:
        model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=16))
        return scores.Transformer(
            self._save(model),
            transformer_task="text-generation",
            processor_kwargs={"chat_template": _CHAT},
        )

    def clip(self) -> str:
        sizes = _SIZES | {"eos_token_id": END}
        pixels = {"image_size": 32, "patch_size": 8}
        model = CLIPModel(CLIPConfig(text_config=sizes, vision_config=_SIZES | pixels))
        folder = self._save(model)
        save_image_processor(Path(folder), model.config)
        return folder

    def words(self) -> dense.WordEmbeddings:
        tokenizer = WhitespaceTokenizer(_WORDS, stop_words=[], do_lower_case=True)
        return dense.WordEmbeddings(tokenizer, torch.randn(len(_WORDS), _WIDTH))

    def static(self) -> dense.StaticEmbedding:
        return dense.StaticEmbedding(self.tokenizer, embedding_dim=_WIDTH)

    def answers(self) -> list[int]:
        return [self.tokenizer.vocab[answer] for answer in ("yes", "no")]

    def token_vectors(self, *modules: Module) -> list[Module]:
        projection = dense.Dense(_WIDTH, 16, **_ON_TOKENS)
        return [self.transformer(), projection, *modules, dense.Normalize(**_ON_TOKENS)]

    def _save(self, model: Any) -> str:
        folder = self._folder / type(model).__name__
        save_random(model, folder)
        save_tokenizer(folder, ["token_type_ids"] if "Bert" in folder.name else [])
        return str(folder)


# For each class of models, and each module of them, the modules of a model that has it.
_RECIPES: Mapping[type, Mapping[str, Callable[[_Parts], list[Any]]]] = {
    SentenceTransformer: {
        "Transformer": lambda p: [p.transformer(), p.pooling],
        "Pooling": lambda p: [p.transformer(), dense.Pooling(_WIDTH, _POOLINGS)],
        "Dense": lambda p: [p.transformer(), p.pooling, dense.Dense(_WIDTH, 32)],
        "LayerNorm": lambda p: [p.transformer(), p.pooling, dense.LayerNorm(_WIDTH)],
        "Normalize": lambda p: [p.transformer(), p.pooling, dense.Normalize()],
        "Dropout": lambda p: [p.transformer(), p.pooling, dense.Dropout()],
        "CLIPModel": lambda p: [dense.CLIPModel(p.clip())],
        "CNN": lambda p: [p.transformer(), dense.CNN(_WIDTH, 32), dense.Pooling(96)],
        "LSTM": lambda p: [p.transformer(), dense.LSTM(_WIDTH, 32), p.pooling],
        "WeightedLayerPooling": lambda p: [
            p.transformer(output_hidden_states=True),
            dense.WeightedLayerPooling(_WIDTH, 2, layer_start=1),
            p.pooling,
        ],
        "WordEmbeddings": lambda p: [p.words(), p.pooling],
        "WordWeights": lambda p: [p.words(), dense.WordWeights(_WORDS, {_WORDS[0]: 2}), p.pooling],
        "BoW": lambda _: [dense.BoW(_WORDS)],
        "StaticEmbedding": lambda p: [p.static()],
        "Router": lambda p: [
            dense.Router.for_query_document([p.static()], [p.transformer(), p.pooling])
        ],
    },
    SparseEncoder: {
        "MLMTransformer": lambda p: [p.mlm(), sparse.SpladePooling("max")],
        "SpladePooling": lambda p: [p.mlm(), sparse.SpladePooling("sum")],
        "SparseAutoEncoder": lambda p: [
            p.transformer(), p.pooling, sparse.SparseAutoEncoder(_WIDTH, 128, k=16),
        ],
        "SparseStaticEmbedding": lambda p: [
            dense.Router.for_query_document(
                [sparse.SparseStaticEmbedding(p.tokenizer, torch.rand(len(p.tokenizer)))],
                [p.mlm(), sparse.SpladePooling("max")],
            )
        ],
    },
    MultiVectorEncoder: {
        "MultiVectorMask": lambda p: p.token_vectors(tokens.MultiVectorMask(["?"])),
        "HierarchicalTokenPooling": lambda p: [
            *p.token_vectors(), tokens.HierarchicalTokenPooling(2.0),
        ],
    },
    CrossEncoder: {
        "LogitScore": lambda p: [p.causal(), scores.LogitScore(*p.answers())],
    },
}  # fmt: skip


def save_modules(folder: Path, name: str) -> type:
    """Save a model with the module of this name; return its class.

    Raises `NotBuiltError` for a module that has no recipe, or that needs further libraries.
    """
    found = [(kind, makes[name]) for kind, makes in _RECIPES.items() if name in makes]
    if not found:
        raise NotBuiltError("tools/matrix/modules.py has no model with it")
    model_class, make = found[0]
    torch.manual_seed(4)
    try:
        model = model_class(modules=make(_Parts(folder.with_name("parts"))), device="cpu")
        model.save(str(folder))
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {error!s:.160}") from error
    return model_class


def compute(folder: Path, model_class: type) -> list[Any]:
    """Compute texts as queries and as documents, or the scores of passages, each alone."""
    model: Any = model_class(str(folder), device="cpu", local_files_only=True)
    if model_class is CrossEncoder:
        pairs = [(TEXTS[0], passage) for passage in PASSAGES]
        identity = torch.nn.Identity()
        return [model.predict([pair], activation_fn=identity)[0] for pair in pairs]
    options = {"convert_to_sparse_tensor": False} if model_class is SparseEncoder else {}
    # Sparse vectors are whole rows.
    width = VOCABULARY if model_class is SparseEncoder else 0
    vectors = (
        np.asarray(encode([text], **options)[0])
        for encode in (model.encode_query, model.encode_document)
        for text in TEXTS
    )
    return [np.pad(v, (0, width - len(v))) if width else v for v in vectors]
