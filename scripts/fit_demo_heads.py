"""Fit the demo model's two extra heads and write them to tools/demo/heads.json.

all-MiniLM-L6-v2 comes with neither a lexical nor a late-interaction head. This makes both from what
is on every machine: the model's package, and the documentation that ships with Python. The same
Python version gives the same numbers; another one ships other texts and gives slightly other ones.
It takes a few minutes.

Lexical head: a word should weigh the more, the rarer it is. BERT's vocabulary lists words roughly
by falling frequency, and by Zipf's law the logarithm of the rank then stands in for the inverse
document frequency. A ridge regression learns to read that rarity from the hidden states.

Late-interaction head: the identity. The hidden states of a model that was trained with mean pooling
compare well as they are; the report printed at the end holds the alternatives that were tried.

Run it from the repository's root: python -m scripts.fit_demo_heads
"""

import argparse
import ast
import hashlib
import json
import math
import platform
import random
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

from tools.demo.checkpoint import COPIED_FILES, package_folder

Vector = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

FIRST_WORD = 1996  # the id of "the"; below it stand special tokens, punctuation and characters
WORDLESS_RANK = 60  # words as common as the first sixty are to weigh nothing
LAST_RANK = 28_000
LAST_ID = 30_521
SCALE = 0.5  # weight of the rarest words, so that a match scores about as it does with bge-m3
RIDGE = 0.01  # in units of the mean variance of a hidden dimension
SEED = 0
MAX_TOKENS = 128
HELD_OUT_EVERY = 4  # every fourth module and every tenth word are kept from the fit
UNSEEN_EVERY = 10
MAX_PARAGRAPHS = 4000
MAX_PAIRS = 400
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip"}

TEMPLATES = """\
{}
{} {} {} {}
What is {}?
Who was {} and what did they do?
How does {} work with {}?
Why is my {} so {}?
Can I use {} instead of {} for the {}?
Where do I find the {} of {}, and how much is it?
When did {} become {}, and who was there?
Which is better, {} or {}?
Is there any {} that does not need {}?
Should I have the {} before or after the {}?
How long does it take until {} is {}?
Do they still {} in {}?
I have no {} and I do not know what to do about it.
He said that the {} was more {} than a {}.
She had been to {} once, but she would not go there again.
They were all very {} because nobody had told them about the {}.
It is not the {} but the {} that makes a {}.
If you want to {}, you must first {} it, and then you can {} it.
There are two kinds of {}: those with {} and those that have none.
A {} is a {} that is used for {}.
Most of the {} comes from {}, where it has been known for a long time.
In 1921 the {} {} moved to {}, where it became known for its {}.
From {} to {} it is about 30 miles by the old {}.
You will need a {}, some {} and at least 4 of the {}.
This is why we were never able to see the {} as it really was.
When the {} is over, the {} goes back to its {} and stays there for years.
His {} was so {} that her {} could not be heard at all.
The {} may be {} at any time, as long as it has been {} by the {}.
It was he who wrote the {} in which the {} is said to be {}.
Both {} and {} are part of what we now call {}.
""".splitlines()


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts to fit on, texts to judge by, and pairs (summary, body) of held-out docstrings."""

    fitted: list[str]
    held_out: list[str]
    pairs: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class States:
    """Token `ids` `[n]` and last hidden `states` `[n, hidden]` of one text, special ones too."""

    ids: Ids
    states: Tensor


class Encoder:
    """The packaged model and its tokenizer; texts of equal length go through it together."""

    def __init__(self, folder: Path) -> None:
        """Load float32 weights from the package's model folder."""
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)
        ids = map(self.tokenizer.token_to_id, ("[PAD]", "[UNK]", "[CLS]", "[SEP]"))
        self.special = [i for i in ids if i is not None]

    def vocabulary(self) -> list[str]:
        """Every token, by id."""
        return [str(self.tokenizer.id_to_token(i)) for i in range(self.tokenizer.get_vocab_size())]

    def ids(self, texts: Iterable[str]) -> list[Ids]:
        """Token ids of each text, special tokens included."""
        return [np.array(self.tokenizer.encode(text).ids) for text in texts]

    def batches(self, sequences: list[Ids]) -> Iterator[tuple[list[int], Tensor]]:
        """Positions of `b` sequences of equal length and their states `[b, n, hidden]`, in turn."""
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for position, ids in enumerate(sequences):
            by_length[len(ids)].append(position)
        for _, positions in sorted(by_length.items()):
            for start in range(0, len(positions), 64):
                chosen = positions[start : start + 64]
                rows = torch.from_numpy(np.stack([sequences[i] for i in chosen]))
                with torch.inference_mode():
                    yield chosen, self.model(input_ids=rows).last_hidden_state

    def states(self, texts: list[str]) -> list[States]:
        """The states of each text, in the order given."""
        sequences = self.ids(texts)
        found = {
            i: s for chosen, b in self.batches(sequences) for i, s in zip(chosen, b, strict=True)
        }
        return [States(ids, found[i]) for i, ids in enumerate(sequences)]


def rarity(vocabulary: list[str]) -> Vector:
    """`[vocabulary]`: the weight that each token ought to have; negative ones mean none."""
    ranks = np.arange(len(vocabulary)) - FIRST_WORD + 1.0
    common, rare = math.log(WORDLESS_RANK), math.log(LAST_RANK)
    target = (np.log(np.maximum(ranks, 1)) - common) / (rare - common)
    for i, token in enumerate(vocabulary[:FIRST_WORD]):
        target[i] = 0.1 if token.isalnum() else -0.3
    return np.asarray(SCALE * np.clip(target, -0.5, 1))


def stdlib_docstrings() -> Iterator[tuple[int, str]]:
    """Docstrings of the standard library, each with the number of its module; imports nothing."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = (p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts))
    for number, path in enumerate(sorted(modules, key=lambda p: p.relative_to(root).as_posix())):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield number, ast.get_docstring(node) or ""


def paragraphs(texts: Iterable[str]) -> list[str]:
    """The distinct paragraphs that are prose rather than code or tables, sorted."""
    blocks = (" ".join(block.split()) for text in texts for block in re.split(r"\n\s*\n", text))
    return sorted({block for block in blocks if 60 < len(block) < 600 and _is_prose(block)})


def _is_prose(text: str) -> bool:
    return sum(c.isalpha() or c == " " for c in text) > 0.9 * len(text)


def summary_and_body(docstring: str) -> tuple[str, str] | None:
    """The two as a question and its answer; None where the docstring has no such form."""
    summary, body = (" ".join(part.split()) for part in docstring.partition("\n\n")[::2])
    fits = summary.endswith(".") and 30 < len(summary) < 150 < len(body) and ">>>" not in body[:400]
    return (summary, body[:500]) if fits else None


def sentences(vocabulary: list[str], rng: random.Random) -> list[str]:
    """The templates filled with every plain word of the vocabulary."""
    words = [w for w in vocabulary[FIRST_WORD:] if w.isalpha() and w.isascii() and len(w) > 2]
    supply = iter(rng.sample(words, len(words)))
    filled: list[str] = []
    while True:
        template = TEMPLATES[len(filled) % len(TEMPLATES)]
        chosen = [word for _, word in zip(range(template.count("{}")), supply, strict=False)]
        if len(chosen) < template.count("{}"):
            return filled
        filled.append(template.format(*chosen))


def gather(vocabulary: list[str]) -> Corpus:
    """Python's documentation and the filled templates, with every fourth module held out."""
    rng = random.Random(SEED)
    docstrings = list(stdlib_docstrings())
    fitted = [text for number, text in docstrings if number % HELD_OUT_EVERY]
    held_out = [text for number, text in docstrings if number % HELD_OUT_EVERY == 0]
    prose = paragraphs([*topics.values(), *fitted])
    pairs = sorted(dict(filter(None, map(summary_and_body, held_out))).items())
    return Corpus(
        fitted=rng.sample(prose, min(MAX_PARAGRAPHS, len(prose))) + sentences(vocabulary, rng),
        held_out=sorted(set(paragraphs(held_out)) - set(prose)),
        pairs=rng.sample(pairs, min(MAX_PAIRS, len(pairs))),
    )


def fit(encoder: Encoder, texts: list[str], target: Vector, kept: Mask) -> Vector:
    """Weights and, last, the bias of the ridge regression from states to `target`.

    Only tokens `kept` take part. A token counts the less the more often it occurs (by the fourth
    root), so that "the" does not outvote everything else.
    """
    sequences = encoder.ids(texts)
    counts = np.bincount(np.concatenate(sequences), minlength=len(target))
    share = np.where(kept, np.maximum(counts, 1) ** -0.25, 0.0)
    moments: Vector | float = 0.0
    for chosen, states in encoder.batches(sequences):
        ids = np.concatenate([sequences[i] for i in chosen])
        rows = states.flatten(0, 1).double().numpy()
        columns = np.column_stack((rows, target[ids], np.ones(len(ids))))
        moments = moments + (columns * share[ids, None]).T @ columns
    return _solve(np.asarray(moments))


def _solve(moments: Vector) -> Vector:
    """Ridge regression from the second moments of (states, target, one); the bias is not shrunk."""
    mean = moments[-1, :-1] / moments[-1, -1]
    covariance = moments[:-1, :-1] / moments[-1, -1] - np.outer(mean, mean)
    inner = covariance[:-1, :-1]
    shrunk = inner + RIDGE * np.trace(inner) / len(inner) * np.eye(len(inner))
    weight = np.linalg.solve(shrunk, covariance[:-1, -1])
    return np.append(weight, mean[-1] - mean[:-1] @ weight)


def judge(
    encoder: Encoder, texts: list[str], head: Vector, target: Vector, kept: Mask
) -> tuple[float, float]:
    """Correlation of read and wanted weights: over all tokens kept, and once for each such token.

    The second is the mean over a token's occurrences, so that frequent tokens count no more.
    """
    found = encoder.states(texts)
    ids = np.concatenate([text.ids for text in found])
    read = np.concatenate([_read(text, head) for text in found])
    ids, read = ids[kept[ids]], read[kept[ids]]
    distinct, place = np.unique(ids, return_inverse=True)
    mean = np.bincount(place, read) / np.bincount(place)
    return _correlation(read, target[ids]), _correlation(mean, target[distinct])


def _correlation(a: Vector, b: Vector) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def retrieval(
    encoder: Encoder, pairs: list[tuple[str, str]], head: Vector, center: Tensor
) -> dict[str, int]:
    """How many summaries put their own body first, by each way of scoring."""
    questions, answers = (encoder.states(list(side)) for side in zip(*pairs, strict=True))
    dense = np.inner(_dense(questions), _dense(answers))
    sparse = np.inner(*(_sparse(side, head, encoder.special) for side in (questions, answers)))
    late = _late_interaction(questions, answers, torch.zeros_like(center))
    tables = {
        "dense": dense,
        "sparse": sparse,
        "colbert, identity": late,
        "colbert, mean removed": _late_interaction(questions, answers, center),
        "fused, equal weights": dense + sparse + late,
    }
    own = np.arange(len(pairs))
    return {name: int((scores.argmax(1) == own).sum()) for name, scores in tables.items()}


def _read(text: States, head: Vector) -> Vector:
    return np.asarray(text.states.double().numpy() @ head[:-1] + head[-1])


def _dense(texts: list[States]) -> Vector:
    rows = torch.stack([text.states.mean(0) for text in texts])
    return normalize(rows.double(), dim=1).numpy()


def _sparse(texts: list[States], head: Vector, special: list[int]) -> Vector:
    """`[texts, vocabulary]`, which is affordable for a few hundred texts only."""
    rows = np.zeros((len(texts), LAST_ID + 1))
    for row, text in zip(rows, texts, strict=True):
        np.maximum.at(row, text.ids, _read(text, head))
    rows[:, special] = 0
    return rows


def _late_interaction(questions: list[States], answers: list[States], center: Tensor) -> Vector:
    vectors = normalize(torch.cat([text.states[1:] - center for text in answers]), dim=1)
    starts = np.cumsum([0, *(len(text.ids) - 1 for text in answers[:-1])])
    rows = []
    for text in questions:
        similarity = (normalize(text.states[1:] - center, dim=1) @ vectors.T).double().numpy()
        rows.append(np.maximum.reduceat(similarity, starts, axis=1).mean(0))
    return np.stack(rows)


def examples(encoder: Encoder, head: Vector) -> Iterator[str]:
    """Token weights in a few sentences that are in no corpus."""
    for sentence in (
        "What is the capital of France?",
        "The quick brown fox jumps over the lazy dog.",
        "How does photosynthesis turn sunlight into sugar?",
    ):
        (text,) = encoder.states([sentence])
        pairs = list(zip(text.ids, _read(text, head), strict=True))[1:-1]
        yield "  ".join(f"{encoder.tokenizer.id_to_token(i)} {max(w, 0):.2f}" for i, w in pairs)


def write(path: Path, folder: Path, head: Vector) -> None:
    """The heads and the checksums of the files they belong to, as JSON."""
    sums = {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in COPIED_FILES}
    content = {
        "made_by": f"scripts/fit_demo_heads.py with Python {platform.python_version()}",
        "checksums": sums,
        "colbert_linear": {"scale": 1.0},
        "sparse_linear": {"bias": float(head[-1]), "weight": head[:-1].tolist()},
    }
    text = json.dumps(content, indent=1)
    # Numbers side by side rather than one a line.
    text = re.sub(r",\n +(?=-?\d)", ", ", text)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Fit, print how good the fit is, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("tools/demo/heads.json"),
        help="the file for the heads (%(default)s)",
    )
    output = parser.parse_args().output
    folder = package_folder()
    encoder = Encoder(folder)
    vocabulary = encoder.vocabulary()
    corpus = gather(vocabulary)
    print(f"{len(corpus.fitted)} texts to fit on, {len(corpus.held_out)} held out")

    target = rarity(vocabulary)
    ordinary = ~np.isin(np.arange(len(vocabulary)), encoder.special)
    unseen = ordinary & (np.arange(len(vocabulary)) % UNSEEN_EVERY == 0)
    head = np.round(fit(encoder, corpus.fitted, target, ordinary & ~unseen), 4)
    report(encoder, corpus, head, target, {"all tokens": ordinary, "words never fitted": unseen})
    write(output, folder, head)


def report(
    encoder: Encoder,
    corpus: Corpus,
    head: Vector,
    target: Vector,
    groups: dict[str, Mask],
) -> None:
    """Print the fit's quality on texts that took no part in it."""
    for name, kept in groups.items():
        each, once = judge(encoder, corpus.held_out, head, target, kept)
        print(f"correlation on held-out texts, {name}: {each:.3f}, each token once {once:.3f}")
    center = torch.cat([text.states for text in encoder.states(corpus.held_out[:500])]).mean(0)
    print(f"right body first among {len(corpus.pairs)} held-out docstrings:")
    for name, count in retrieval(encoder, corpus.pairs, head, center).items():
        print(f"  {name}: {count}")
    print(*examples(encoder, head), sep="\n")


if __name__ == "__main__":
    main()
