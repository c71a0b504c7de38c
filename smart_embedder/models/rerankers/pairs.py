"""How a reranker reads a query with each passage: the tokens around them, and what is cut.

Each class has `fill`, which makes a pair of the query with each passage. `described` is the layout
for the id of a vector space.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.kernels.packed_batch import SECOND_SEGMENT
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.rerankers.templates import (
    BEHIND_QUERY,
    INSTRUCTION,
    MARKERS,
    PASSAGE,
    PREFIX,
    QUERY,
    SUFFIX,
    Template,
)
from smart_embedder.models.tokenizer import (
    NO_IDS,
    NO_LIMIT,
    TextTokenizer,
    TruncatedTokens,
    cut_text,
)
from smart_embedder.requests import CUT_AT_END, Side, TruncationOptions
from smart_embedder.tokens import JoinedIds, TokenCount, TokenIds, TokenizedPair


class TokenizerPairs:
    """Pairs as in the tokenizer's own template, cut as by `FlagReranker` of FlagEmbedding.

    With `marks`, the tokens have the segments of that template. With `drops_empty` only the query
    is read if the passage is empty.
    """

    reads_instruction = False

    def __init__(self, tokenizer: TextTokenizer, *, marks: bool, drops_empty: bool) -> None:
        self._tokenizer, self._drops_empty = tokenizer, drops_empty
        self._template = tokenizer.pair_template()
        segments = tokenizer.pair_segments() if marks else [0] * 5
        self._marks = [SECOND_SEGMENT * segment for segment in segments]
        ids = [part.tolist() for part in self._template]
        self.described = [*ids, any(self._marks), drops_empty]

    def fill(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Cut the query to three quarters of the limit and each passage to the rest."""
        del instruction
        max_length, marks = self._tokenizer.max_length, self._marks
        prefix, middle, suffix = self._template
        (asked,) = self._tokenizer.encode_plain([query], max_length * 3 // 4)
        limit = truncation.lower(max_length - sum(map(len, self._template)) - asked.kept)
        head = np.concatenate((prefix | marks[0], asked.ids | marks[1]))
        pairs: list[TokenizedPair] = []
        for text in self._tokenizer.encode_plain(passages, max(0, limit), truncation.side):
            between = middle if text.total or not self._drops_empty else NO_IDS
            end = np.concatenate((between | marks[2], text.ids | marks[3], suffix | marks[4]))
            if not len(head) + len(end):  # A forward needs at least one token.
                end = np.zeros(1, np.int64)
            pairs.append(TokenizedPair(JoinedIds(head, end), asked.count, text.count))
        return pairs


class QwenPairs:
    """Pairs in the prompt of Qwen3-Reranker; its prefix and suffix are never cut.

    What is between them is cut from its end, as on the model card: first the passage, then the
    query. Each text is tokenized alone: before it stands a space, where every word begins.
    """

    reads_instruction = True
    described: object = (PREFIX, SUFFIX, DEFAULT_INSTRUCTION)

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        fixed = tokenizer.encode_plain([PREFIX, SUFFIX, " ", BEHIND_QUERY], len(PREFIX))
        self.prefix, self.suffix, self._space, self._behind_query = (text.ids for text in fixed)
        fixed_count = len(self.prefix) + len(self.suffix)
        self._limit = tokenizer.max_length - fixed_count
        if self._limit < 1:
            raise StartupError(
                f"a length limit of {tokenizer.max_length} tokens leaves no room beside the "
                f"{fixed_count} tokens of the reranker's template"
            )

    def fill(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Make a pair of the query with each passage, cut to the limit."""
        texts = [instruction or DEFAULT_INSTRUCTION, query]
        cut_instruction, cut_query = cut = [cut_text(text, self._limit) for text in texts]
        exact = cut == texts
        around = [f"<Instruct>: {cut_instruction}\n<Query>:", f" {cut_query}{BEHIND_QUERY}"]
        before, asked = self._tokenizer.encode_plain(around, NO_LIMIT)
        content = np.concatenate((before.ids, asked.ids))
        head = np.concatenate((self.prefix, content[: self._limit]))
        # Find the query's own tokens among those before a passage.
        tokens, behind = len(content), self._behind_query
        query_start = before.total + self._count_spaces(asked)
        # The line break behind the query may be one token with the end of the query, and counts.
        is_separate = np.array_equal(content[-len(behind) :], behind)
        query_stop = tokens - len(behind) + (not is_separate)
        query_kept = max(0, min(self._limit, query_stop) - query_start)
        query_count = TokenCount(query_stop - query_start + (not exact), query_kept, exact)
        limit = truncation.lower(max(0, self._limit - tokens))
        pairs: list[TokenizedPair] = []
        spaced = [f" {passage}" for passage in passages]
        for passage in self._tokenizer.encode_plain(spaced, limit, truncation.side):
            spaces = self._count_spaces(passage)
            # A passage that is cut from the left loses the space of the template first.
            is_cut_left = passage.side == "left" and passage.total > passage.kept
            passage_kept = max(0, passage.kept - (0 if is_cut_left else spaces))
            passage_count = TokenCount(passage.total - spaces, passage_kept, passage.exact)
            end = np.concatenate((passage.ids, self.suffix))
            pairs.append(TokenizedPair(JoinedIds(head, end), query_count, passage_count))
        return pairs

    def _count_spaces(self, text: TruncatedTokens) -> int:
        """Count the tokens of the template's space; 0 if it is part of the text's first token."""
        space = self._space.tolist()
        return len(space) if text.first[: len(space)] == space else 0


class _Piece(NamedTuple):
    """The tokens of a text in a template, or of the words around it, whose `marker` is empty.

    `stops` has the number of its characters up to the end of each token.
    """

    marker: str
    ids: TokenIds
    stops: TokenIds

    def cut(self, kept: Mapping[str, int], side: Side = "right") -> TokenIds:
        """Return the `kept` tokens of a text, or all if it has no limit; cut passages on `side`."""
        count = kept.get(self.marker, len(self.ids))
        if self.marker == PASSAGE and side == "left":
            return self.ids[max(0, len(self.ids) - count) :]
        return self.ids[:count]


class TemplatePairs:
    """Pairs in a template, which is never cut. Its parts are tokenized one by one, as a whole."""

    def __init__(self, template: Template, tokenizer: TextTokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self.described: object = repr(template)
        self.reads_instruction = bool(template.instructed)
        special = tokenizer.special_tokens if template.has_special_tokens else ([], [])
        self._begin, self._end = (
            np.array([token.id for token in tokens], np.int64) for tokens in special
        )
        if self._tokenize_around({}, template.parts)[1] < 2:  # noqa: PLR2004 - one of each text
            raise StartupError(
                f"a length limit of {tokenizer.max_length} tokens leaves no room beside the "
                "reranker's template"
            )

    def fill(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Make a pair of the query with each passage.

        The query is cut to three quarters of the room that the template leaves, and each passage to
        the rest.
        """
        template, limit = self._template, self._tokenizer.max_length
        instruction = instruction or template.default_instruction
        parts = template.instructed if instruction and template.instructed else template.parts
        if template.strips:
            query, instruction = query.strip(), instruction and instruction.strip()
            passages = [passage.strip() for passage in passages]
        texts = {QUERY: cut_text(query, limit), INSTRUCTION: instruction or ""}
        around, room = self._tokenize_around(texts, parts)
        index = next(index for index, part in enumerate(parts) if PASSAGE in part)
        (asking,) = (piece for piece in chain(*around) if piece.marker == QUERY)
        asked = len(asking.ids)
        told = sum(len(piece.ids) for piece in chain(*around) if piece.marker == INSTRUCTION)
        if told > (room + told) // 4:
            raise InvalidRequestError(
                f"the instruction has more than the {(room + told) // 4} tokens that it may have"
            )
        query_kept = min(asked, room * 3 // 4)
        exact = len(texts[QUERY]) == len(query)
        query_count = TokenCount(asked + (not exact), query_kept, exact)
        if query_kept < asked:  # The rest is not tokenized again beside each passage.
            texts[QUERY] = query[: asking.stops[query_kept - 1] if query_kept else 0]
        kept = {QUERY: query_kept, PASSAGE: 0}
        before, behind = chain(*around[:index]), [*chain(*around[index + 1 :])]
        head = np.concatenate((self._begin, *(piece.cut(kept) for piece in before)))
        pairs: list[TokenizedPair] = []
        for passage in passages:
            cut_passage = cut_text(passage, limit, truncation.side)
            pieces = self._tokenize(parts[index], texts | {PASSAGE: cut_passage}) + behind
            kept[PASSAGE] = 0
            fixed = len(head) + sum(len(piece.cut(kept)) for piece in pieces) + len(self._end)
            (found,) = (len(piece.ids) for piece in pieces if piece.marker == PASSAGE)
            kept[PASSAGE] = truncation.lower(max(0, min(found, limit - fixed)))
            end = [*(piece.cut(kept, truncation.side) for piece in pieces), self._end]
            exact = len(cut_passage) == len(passage)
            passage_count = TokenCount(found + (not exact), kept[PASSAGE], exact)
            pairs.append(
                TokenizedPair(JoinedIds(head, np.concatenate(end)), query_count, passage_count)
            )
        return pairs

    def _tokenize_around(
        self, texts: Mapping[str, str], parts: Sequence[str]
    ) -> tuple[list[list[_Piece]], int]:
        """Tokenize parts without a passage; return the room for the query and a passage, too."""
        filled = {QUERY: "", PASSAGE: "", INSTRUCTION: "", **texts}
        around = [self._tokenize(part, filled) for part in parts]
        fixed = sum(len(piece.cut({QUERY: 0})) for piece in chain(*around))
        room = self._tokenizer.max_length - fixed - len(self._begin) - len(self._end)
        return around, room

    def _tokenize(self, part: str, texts: Mapping[str, str]) -> list[_Piece]:
        """Tokenize a part with these texts.

        A token is of the piece in which it ends. A `<bos>` that the vocabulary lacks is left out.
        """
        if part == "<bos>" and self._tokenizer.token_id(part) is None:
            return []
        markers = MARKERS.split(part)
        filled = [texts.get(marker, marker) for marker in markers]
        starts = [0, *accumulate(map(len, filled[:-1]))]
        spans = list(self._tokenizer.spans("".join(filled)))
        ids = np.concatenate([NO_IDS, *(span.ids for span in spans)])
        stops = np.concatenate([NO_IDS, *(span.stops for span in spans)])
        borders = [0, *np.searchsorted(stops, starts[1:], "right").tolist(), len(ids)]
        return [
            _Piece(marker if marker in texts else "", ids[begin:end], stops[begin:end] - start)
            for marker, start, (begin, end) in zip(markers, starts, pairwise(borders), strict=True)
        ]


Pairs = TokenizerPairs | QwenPairs | TemplatePairs
