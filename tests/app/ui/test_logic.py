"""The page's modules by themselves, in the node that playwright brings: no browser, no server."""

import json
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.server import REPOSITORY

playwright = pytest.importorskip("playwright", reason="playwright is not installed")
UI = REPOSITORY / "app" / "ui"


NODE = Path(playwright.__file__).parent / "driver" / "node"
# Each line asks to import a module and to run code with it; each line of the answer is a result.
EVALUATE = """
import { createInterface } from "node:readline";
for await (const line of createInterface({ input: process.stdin })) {
  const { module, code, given } = JSON.parse(line);
  try {
    const m = await import(module);
    const result = await new Function("m", "given", `return (async () => (${code}))()`)(m, given);
    console.log(JSON.stringify({ result: result ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: error.stack }));
  }
}
"""


@pytest.fixture(scope="module")
def call():
    """Runs code with an exported function of a module, and with JSON arguments."""
    command = [str(NODE), "--input-type=module", "-e", EVALUATE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as node:

        def run(module: str, code: str, *arguments):
            request = {"module": (UI / module).as_uri(), "code": code, "given": arguments}
            print(json.dumps(request), file=node.stdin)
            answer = json.loads(node.stdout.readline())
            assert "error" not in answer, answer
            return answer["result"]

        yield run
        node.stdin.close()


def safetensors(tensors: dict[str, np.ndarray], report: dict) -> list[int]:
    """The bytes of a file, written by hand from the format's description."""
    names = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8", "uint32": "U32"}
    names["int64"] = "I64"
    header, body = {"__metadata__": {"smart-embedder": json.dumps(report)}}, b""
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        begin, body = len(body), body + tensor.tobytes()
        header[name] = {
            "dtype": names[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": [begin, len(body)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return list(struct.pack("<Q", len(text)) + text + body)


def test_vectors_are_decoded_text_by_text(call) -> None:
    random = np.random.default_rng(7)
    tensors = {
        "dense": random.integers(-127, 127, (2, 4), np.int8),
        "dense_scale": np.float32([0.5, 0.25]),
        "colbert": random.integers(-127, 127, (3, 4), np.int8),
        "colbert_scale": np.float32([1, 2, 3]),
        "colbert_offsets": np.int64([0, 1, 3]),
        "sparse_indices": np.uint32([5, 7, 4_000_000_000]),
        "sparse_values": np.float32([0.5, 0.25, 1]),
        "sparse_offsets": np.int64([0, 0, 3]),
    }
    plain = "v && {rows: v.rows, width: v.width, values: [...v.values], scales: [...v.scales]}"
    found = call(
        "core/embeddings.js",
        "(({report, texts}) => ({report, texts: texts.map((t) => ({"
        f"dense: ((v) => {plain})(t.dense), colbert: ((v) => {plain})(t.colbert),"
        "sparse: [[...t.sparse.indices], [...t.sparse.values]]}))}))"
        "(m.decodeEmbeddings(new Uint8Array(given[0]).buffer))",
        safetensors(tensors, {"usage": {"total_tokens": 3}}),
    )
    assert found["report"] == {"usage": {"total_tokens": 3}}
    first, second = found["texts"]
    assert first["dense"]["values"] == tensors["dense"][0].tolist()
    assert second["dense"]["scales"] == [0.25]
    assert (first["colbert"]["rows"], second["colbert"]["rows"]) == (1, 2)
    assert second["colbert"]["values"] == tensors["colbert"][1:].ravel().tolist()
    assert second["colbert"]["scales"] == [2, 3]
    assert first["sparse"] == [[], []]
    assert second["sparse"] == [[5, 7, 4_000_000_000], [0.5, 0.25, 1]]


def test_formats_with_fewer_bits_become_the_numbers_that_they_stand_for(call) -> None:
    """Every finite float16, and signs of vectors whose last byte is filled up."""
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    half = half[np.isfinite(half)].reshape(1, -1)
    signs = np.where(np.random.default_rng(5).random((1, 12)) > 0.5, 1, -1)
    code = """(() => { const {buffer} = new Uint8Array(given[0]);
      const {texts: [{dense}]} = m.decodeEmbeddings(buffer);
      const ones = {rows: 1, width: 12, values: new Float32Array(12).fill(1)};
      return {...dense, values: [...dense.values], score: maxSim(ones, dense)}; })()"""
    vectors = (UI / "core" / "vectors.js").as_uri()
    code = f"import({vectors!r}).then(({{maxSim}}) => {code})"
    tensors = {"float16": half, "ubinary": np.packbits(signs > 0, axis=1)}
    halves, found = (
        call("core/embeddings.js", code, safetensors({"dense": tensor}, {"output_dtype": dtype}))
        for dtype, tensor in tensors.items()
    )
    assert halves["values"] == half[0].tolist()
    assert (halves["scales"], halves["bytes"]) == (None, half.nbytes)
    assert found["values"][:12] == signs[0].tolist()
    assert (found["width"], found["bytes"]) == (16, 2)
    assert found["score"] == pytest.approx(signs.sum() / 4)


def test_rank_fusion_counts_a_place_by_dense_vectors_three_times(call) -> None:
    rankings = {"dense": [4, 2, 9], "sparse": [2, 4, 7], "colbert": [2]}
    hits = {kind: [{"chunk": i, "score": 1} for i in places] for kind, places in rankings.items()}
    found = call("search/ranking.js", "m.fuse(given[0], 3)", hits)
    assert [hit["chunk"] for hit in found] == [2, 4, 9]
    assert [hit["score"] for hit in found] == pytest.approx([3 / 2 + 1 + 3, 3 + 1 / 2, 3 / 3])


def test_vectors_are_joined_where_a_tab_could_not_hold_all(call) -> None:
    options = "m.optionsFor(Array(given[0]).fill('x'.repeat(700)), given[1], 'int8')"
    model = {"kinds": ["dense", "sparse", "colbert"], "inputTypes": []}
    few, many = (call("search/indexing.js", options, number, model) for number in (1400, 1500))
    assert few == {"output_dtype": "int8"}
    assert many == few | {"colbert_pool_factor": 2}
    dense = {"kinds": ["dense"], "inputTypes": ["document"]}
    typed = {"output_dtype": "int8", "input_type": "document"}
    assert call("search/indexing.js", options, 1500, dense) == typed


def test_a_ranking_keeps_the_order_of_the_text_for_equal_scores(call) -> None:
    found = call("search/ranking.js", "m.rank(given[0], 3, {positive: true})", [0, 2, 1, 2, -1])
    assert [hit["chunk"] for hit in found] == [1, 3, 2]


@pytest.mark.parametrize(
    ("rows", "kind"), [(1, "Float32Array"), (5, "Float32Array"), (8, "Int8Array")]
)
def test_max_sim_is_the_mean_of_the_best_similarities(call, kind: str, rows: int) -> None:
    random = np.random.default_rng(3)
    query = random.standard_normal((rows, 16)).astype(np.float32)
    passage = random.integers(-127, 127, (9, 16)).astype(np.float32)
    scales = random.random(9, np.float32) if kind == "Int8Array" else np.ones(9, np.float32)
    found = call(
        "core/vectors.js",
        "(([q, p, s]) => {"
        f"const rows = {rows};"
        "const query = {rows, width: 16, values: Float32Array.from(q)};"
        f"const values = {kind}.from(p), scales = Float32Array.from(s);"
        "const passage = {rows: 9, width: 16, values, scales};"
        "const best = m.bestMatches(m.similarities(query, passage), rows, 9);"
        "return [m.maxSim(query, passage), best, m.cosine(query, passage)]; })(given)",
        query.ravel().tolist(),
        passage.ravel().tolist(),
        scales.tolist(),
    )
    wanted = query @ (passage * scales[:, None]).T
    assert found[0] == pytest.approx(wanted.max(axis=1).mean(), rel=1e-5)
    assert [match["column"] for match in found[1]] == wanted.argmax(axis=1).tolist()
    cosine = query[0] @ passage[0] / np.linalg.norm(query[0]) / np.linalg.norm(passage[0])
    assert found[2] == pytest.approx(cosine, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("one\ntwo\n\n", ["one", "two"]),
        ("one\r\nline\r\n\r\nAnother one.", ["one line Another one."]),
        ("A whole sentence.\n \t\nAnd the next.", ["A whole sentence.", "And the next."]),
        ("A heading\n\nIts text is here.", ["A heading Its text is here."]),
        ("Its text is here.\n\nThe last heading", ["Its text is here.", "The last heading"]),
    ],
)
def test_a_text_is_cut_into_paragraphs_or_lines(call, text: str, wanted: list[str]) -> None:
    assert call("search/passages.js", "m.chunkText(given[0])", text) == wanted


ROWS = [f"| P{i} | a pump of {i} litres in an hour |" for i in range(40)]
HEAD = "| Name | What |\n|---|:--|"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # A table stays with the heading above it.
        (f"# Pumps\n\n{HEAD}\n{ROWS[0]}\n\nText.", [f"# Pumps\n{HEAD}\n{ROWS[0]}", "Text."]),
        ("a | b\n--|--\n1 | 2\nlast line", ["a | b\n--|--\n1 | 2", "last line"]),
        ("One.\n\n```\na\n\nb\n```\nTwo.", ["One.", "```\na\n\nb\n```", "Two."]),
        ("~~~~\n```\n\n~~~~\n```\nc\n```", ["~~~~\n```\n\n~~~~", "```\nc\n```"]),
        ("```\nnever closed\n\nx", ["```\nnever closed\n\nx"]),
        ("a | b is no table", ["a | b is no table"]),
    ],
)
def test_tables_and_code_are_not_cut(call, text: str, wanted: list[str]) -> None:
    assert call("search/passages.js", "m.chunkText(given[0])", text) == wanted


def test_a_long_table_is_cut_between_rows_and_keeps_its_heads(call) -> None:
    table = "\n".join([HEAD, *ROWS])
    chunks = call("search/passages.js", "m.chunkText(given[0])", table)
    assert len(chunks) > 2
    assert all(chunk.startswith(HEAD) and len(chunk) <= 700 for chunk in chunks)
    rows = [row for chunk in chunks for row in chunk.split("\n")[2:]]
    assert rows == ROWS


READ = """(async () => {
  const files = given[0].map(([name, text]) => new File([text], name));
  const taken = [];
  const take = (text) => taken.push(text) < given[1];
  const { signal } = new AbortController();
  const told = await m.readFiles(m.chosenFiles(files), take, () => {}, signal);
  return [told, taken];
})()"""


def test_files_are_read_in_order_until_there_is_enough(call) -> None:
    names = ["c.txt", f"{'n' * 10_000}.md", "b.txt", "README"]
    told, taken = call("search/files.js", READ, [[name, "text"] for name in names], 3)
    assert told == "Skipped 1 of 4 files: 1 after the last passage that fits."
    assert [text["title"] for text in taken[:2]] == ["README", "b.txt"]
    told, _ = call("search/files.js", READ, [["x.txt", "nul\0"], ["y.txt", "\ufffe"]], 9)
    assert told == "Skipped 1 of 2 files: 1 not in UTF-8."


@pytest.mark.parametrize(
    "text",
    [
        "The pump is stuck, says the display. " * 100,
        "ポンプが動きません。" * 300,
        "word " * 2000,
        "x" * 5000,
        "😀" * 1500,
    ],
)
def test_a_long_paragraph_is_cut_where_it_can_be_and_nothing_is_lost(call, text: str) -> None:
    chunks = call("search/passages.js", "m.chunkText(given[0])", text)
    assert len(chunks) > 1
    assert max(len(chunk.encode("utf-16-le")) // 2 for chunk in chunks) <= 2 * 700
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_tokens_are_laid_over_the_text_by_code_points(call) -> None:
    text = "A 😀 café!"
    spans = [(0, 1, 10), (2, 3, 11), (2, 3, 12), (4, 8, 13), (8, 9, 14)]
    tokens = [{"id": 1, "text": "<s>", "special": True, "start": None, "stop": None}]
    tokens += [
        {"id": token, "text": text[start:stop], "special": False, "start": start, "stop": stop}
        for start, stop, token in spans
    ]
    pieces = call("core/tokens.js", "m.piecesOf(...given)", text, tokens)
    assert "".join(piece["text"] for piece in pieces) == text
    named = [(piece["text"], piece["tokens"]) for piece in pieces if piece["tokens"]]
    # Two tokens of bytes stand for one character.
    assert named == [("A", [0]), ("😀", [1, 2]), ("café", [3]), ("!", [4])]


# The offsets that each kind of tokenizer gives, and the words that are shown of them.
WORDS = {
    "WordPiece": ("Old radiators!", [(0, 3), (4, 6), (6, 9), (9, 13), (13, 14)], "Old|radiators|!"),
    # A mark of its own stands before a word, over the word's first character.
    "SentencePiece": ("do radiators", [(0, 1), (0, 2), (3, 4), (3, 6), (6, 12)], "do|radiators"),
    "bytes": ("do radiators 😀", [(0, 2), (2, 6), (6, 12), (12, 14), (13, 14)],
              "do| radiators| 😀"),
    "punctuation": ("it's E42, x_y", [(0, 2), (2, 3), (3, 4), (5, 6), (6, 8), (8, 9), (10, 13)],
                    "it's|E42|,|x_y"),
    "Chinese": ("我们喜欢。", [(0, 1), (0, 2), (2, 3), (3, 4), (4, 5)], "我们|喜|欢|。"),
    "Japanese": ("ラジエーターが", [(0, 2), (2, 6), (6, 7)], "ラジ|エーター|が"),
    "Thai": ("ที่นี่", [(0, 1), (1, 3), (3, 6)], "ที่|นี่"),
    "Korean": ("라디에이터는", [(0, 2), (2, 5), (5, 6)], "라디에이터는"),
    "a family": ("👨‍👩‍👧🇩🇪", [(i, i + 1) for i in range(7)], "👨‍👩‍👧|🇩🇪"),
    "combining marks": ("e\u0301te\u0301 か\u3099", [(0, 1), (1, 2), (2, 5), (6, 7), (7, 8)],
                        "e\u0301te\u0301|か\u3099"),
    "a long label": ("x" * 10_000, [(i, i + 2) for i in range(0, 10_000, 2)], "x" * 10_000),
}  # fmt: skip


@pytest.mark.parametrize("kind", WORDS)
def test_the_pieces_of_a_word_are_joined(call, kind: str) -> None:
    text, spans, wanted = WORDS[kind]
    tokens = [{"special": False, "start": start, "stop": stop} for start, stop in spans]
    words = call("core/tokens.js", "m.wordsOf(...given)", text, tokens)
    assert "".join(word["text"] for word in words) == text
    assert "|".join(word["text"] for word in words if word["tokens"]) == wanted
    assert [place for word in words for place in word["tokens"]] == [*range(len(spans))]


def test_the_numbers_of_a_word_are_those_of_its_tokens(call) -> None:
    """Weights add up where both texts have the word, and similarities are the pieces' mean."""
    query = {"text": "radiators", "ids": [1, 2], "spans": [(0, 5), (5, 9)]}
    passage = {"text": "radi radiators", "ids": [1, 1, 2], "spans": [(0, 4), (5, 10), (10, 14)]}
    found = call(
        "match/compare.js",
        """(given => { const [query, passage] = given.map(({text, ids, spans}) => m.readText(text,
          ids.map((id, i) => ({id, special: false, start: spans[i][0], stop: spans[i][1],
            text: text.slice(...spans[i])})),
          {dense: null, sparse: {indices: [1, 2], values: [0.5, 0.25]},
            colbert: {rows: ids.length + 1, width: 2, scales: null,
              values: Float32Array.from(
                [...ids, 0].flatMap((id) => [[0, 1], [1, 0], [0.6, 0.8]][id]))},
            strings: {sparse: ["a", "b"],
              colbert: [...spans.map((span) => text.slice(...span)), "</s>"]}}));
          return [false, true].map((isPieces) => { const {tokens, shared, scores} =
            m.compare(query, passage, isPieces); return {labels: tokens.passageLabels,
              matrix: [...tokens.matrix], shared, scores}; }); })(given)""",
        query,
        passage,
    )
    words, pieces = found
    assert words["scores"] == pytest.approx(pieces["scores"])
    assert words["labels"] == ["radi", "radiators", "special tokens"]
    assert pieces["labels"] == ["radi", "radia", "tors", "</s>"]
    assert words["matrix"] == pytest.approx([0.8, 1, 0.4, 0, 0.8, 1], abs=1e-6)
    of_pieces = [1, 1, 0.6, 0, 0.6, 0.6, 1, 0.8, 0, 0, 0.8, 1]
    assert pieces["matrix"] == pytest.approx(of_pieces, abs=1e-6)
    (term,) = words["shared"]
    assert (term["text"], term["query"], term["product"]) == ("radiators", 0.75, 0.3125)
    assert len(pieces["shared"]) == 2


@pytest.mark.parametrize(
    ("strings", "texts", "wanted"),
    [
        # bge-m3: no vector of the first special token, one of the end.
        (["▁The", "▁pump", "</s>"], ["The", " pump"], [0, 1, None]),
        # Cut off behind the second token.
        (["▁The", "▁pump", "</s>"], ["The", " pump", " hums"], [0, 1, None]),
        # ColBERT: markers in front, punctuation without a vector, masks at the end.
        (
            ["[CLS]", "[D]", "the", "pump", "##ing", "is", "[SEP]", "[MASK]"],
            ["The", "pump", "ing", ",", "is", "."],
            [None, None, 0, 1, 2, 4, None, None],
        ),
        # A word of a prompt comes again in the text.
        (["[CLS]", "query", ":", "a", "query", "[SEP]"], ["a", "query"], [None] * 3 + [0, 1, None]),
        # What the vocabulary writes in another way belongs to what is between its neighbours.
        (["[CLS]", "a", "[UNK]", "b", "[SEP]"], ["a", "☃", "b"], [None, 0, 1, 2, None]),
        (["[CLS]", "cafe", "[SEP]"], ["Café"], [None, 0, None]),
        (["</s>"], [], [None]),
    ],
)
def test_vectors_are_laid_to_tokens(
    call, strings: list[str], texts: list[str], wanted: list[int | None]
) -> None:
    tokens = [{"id": i, "text": text, "special": False} for i, text in enumerate(texts)]
    assert call("core/tokens.js", "m.placesOf(...given)", strings, tokens) == wanted


# The charts of the view Service.

FAILED = 'embedding_requests_total{status="error",endpoint="/embeddings/"}'
ANSWERED = 'embedding_requests_total{status="success",endpoint="/embeddings/"}'
BUCKET = "embedding_request_duration_seconds_bucket"


def exposition(step: int) -> str:
    """The metrics after some seconds, in each of which two requests succeed and one fails."""
    durations = {"0.1": 0, "0.25": 3 * step, "+Inf": 3 * step}
    counts = {
        ANSWERED: 2 * step,
        FAILED: step,
        'rerank_requests_rejected_total{reason="auth"}': step,
        'embedder_tokens_processed_total{model="a \\"b\\""}': 100 * step,
        "embedder_batch_tokens_sum": 100 * step,
        "embedder_batch_tokens_count": step,
        "embedding_queue_size": 4,
        "process_resident_memory_bytes": 4e8,
    }
    counts |= {f'{BUCKET}{{endpoint="/embeddings/",le="{le}"}}': n for le, n in durations.items()}
    return "# HELP ...\n" + "".join(f"{name} {float(value)}\n" for name, value in counts.items())


def points_of(call, readings: list[tuple[int, int]]) -> list[dict[str, float | None]]:
    """The points of readings of the metrics: seconds of the clock, and of uptime."""
    given = [[exposition(uptime), {"uptime_seconds": uptime}, at * 1000] for at, uptime in readings]
    code = "((h) => (given[0].forEach((point) => h.add(...point)), h.points))(new m.History())"
    return call("service/history.js", code, given)


def test_figures_are_of_the_ten_seconds_before_them(call) -> None:
    first, second, third = points_of(call, [(100, 0), (106, 6), (112, 6), (118, 12)])
    assert (first["at"], first["requests"], first["failed"], first["refused"]) == (106_000, 3, 1, 1)
    assert (first["tokens"], first["forward_tokens"]) == (100, 100)
    assert 0.2 < first["latency"] < 0.25
    assert (first["queue"], first["memory"]) == (4, 4e8)
    nothing = {"requests": 0, "failed": 0, "tokens": 0, "latency": None, "forward_tokens": None}
    assert second == second | nothing
    assert third["requests"] == 3


def test_a_pause_and_a_new_process_have_no_figures(call) -> None:
    paused = points_of(call, [(0, 0), (3, 3), (60, 60), (63, 63)])
    assert [point["at"] for point in paused] == [3000, 63_000]
    restarted = points_of(call, [(0, 50), (3, 53), (6, 2), (9, 5)])
    assert [(point["at"], point["requests"]) for point in restarted] == [(3000, 3), (9000, 3)]


def test_fifteen_minutes_of_points_are_kept(call) -> None:
    slow = points_of(call, [(5 * step, step) for step in range(400)])
    assert [point["at"] for point in slow] == [1_095_000 + 5000 * step for step in range(181)]
    slept = points_of(call, [(0, 0), (3, 3), (3600, 3600), (3603, 3603)])
    assert [point["at"] for point in slept] == [3_603_000]
