"""HTML pages become sections with headings and anchors, without navigation."""

import pytest
from smart_embedder_client.ingest.html import Section, read_html

SPHINX = """<!DOCTYPE html><html><head><title>csv &#8212; Python</title></head><body>
<div class="related" role="navigation"><h3>Navigation</h3><ul><li><a href="i.html">index</a></ul>
</div><div role="main"><section id="csv"><h1>csv<a class="headerlink" href="#csv">\u00b6</a></h1>
<p>It   reads <b>files</b>.</p><section id="contents">
<h2>Contents<a class="headerlink" href="#contents">\u00b6</a></h2>
<section id="functions"><h3>Functions<a class="headerlink" href="#functions">\u00b6</a></h3>
<dl><dt id="csv.reader">csv.reader(file)<a class="headerlink" href="#csv.reader">\u00b6</a></dt>
<dd><p>Reads rows.</p><div class="highlight"><button>Copy</button><pre><span></span># a comment
for row in reader:
    <b>print</b>(row)

</pre></div></dd>
<dt id="csv.writer">csv.writer(file)</dt><dd><p>Writes rows.</p></dd></dl></section></section>
<section id="options"><h2>Options</h2><table><thead><tr><th>name</th><th>default</th></tr></thead>
<tr><td><p>delimiter</p></td><td>a comma</td></tr></table>
<aside class="footnote"><p>[1] Set <a href="#x">newline</a> to an empty text.</p></aside>
</section></section></div>
<div class="sphinxsidebar" role="navigation"><a href="bugs.html">Report a Bug</a></div>
<footer>Copyright</footer></body></html>"""


def test_html_page_becomes_sections_without_navigation() -> None:
    title, sections = read_html(SPHINX.encode())
    assert title == "csv \u2014 Python"
    functions = (
        "## Contents\n\n### Functions\n\ncsv.reader(file)\n\nReads rows.\n\n"
        "```\n# a comment\nfor row in reader:\n    print(row)\n```\n\n"
        "csv.writer(file)\n\nWrites rows."
    )
    options = (
        "## Options\n\n| name | default |\n| --- | --- |\n| delimiter | a comma |\n\n"
        "[1] Set newline to an empty text."
    )
    assert sections == [
        Section(("csv",), "# csv\n\nIt reads files.", "csv"),
        Section(("csv", "Contents", "Functions"), functions, "functions"),
        Section(("csv", "Options"), options, "options"),
    ]


WITHOUT_LANDMARKS = """<div class="navheader"><table><tr><th>CREATE TABLE</th></tr><tr><td>
<a href="p.html">Prev</a> SQL Commands</td></tr></table></div>
<ul class="toc"><li><a href="a.html">Assertions</a><li><a href="b.html">Buffer</a></ul>
<aside>Another page</aside>
<div class="sect1"><div class="titlepage"><a name="create"></a><h2>CREATE TABLE</h2></div>
<p>It defines a table, which is empty at first and belongs to the user who gives the command.</p>
<ul><li>See <a href="c.html">ALTER TABLE</a> for changes of a table.</ul></div>"""


def test_navigation_without_landmarks_is_found_by_names() -> None:
    _, (section,) = read_html(WITHOUT_LANDMARKS.encode())
    assert section.headings == ("CREATE TABLE",)
    assert section.anchor == "create"
    assert section.text == (
        "## CREATE TABLE\n\nIt defines a table, which is empty at first and belongs to the user "
        "who gives the command.\n\n- See ALTER TABLE for changes of a table."
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<main></main><p>made by a script", "made by a script"),
        ("<form><p>a page in a form</p></form>", "a page in a form"),
        ("<p>a page with a search<form>find</form>", "a page with a search"),
        ("<article>one</article><article>two</article>", "one\n\ntwo"),
        ("<header><h1>a blog</h1></header><article>one</article>", "one"),
        ("<ul><li><a href=a>an</a><li><a href=b>index</a></ul>", "- an\n- index"),
        ("<ul><li><p>one</p><li><li>two</ul>", "- one\n\n- two"),
        ("<table><tr><td>no<td>header</table>", "no header"),
        ("<table><tr><td><pre>a\nb</pre><td>layout</table>", "```\na\nb\n```\n\nlayout"),
        ("<td>a cell <td>without a row", "a cell without a row"),
        ("<pre>```\ncode\n```</pre>", "````\n```\ncode\n```\n````"),
        ("<p>a<br>b <i> c</i>d", "a\nb cd"),
        ("<h1><a href='#a'>#</a></h1><p>no title", "no title"),
        ("<p>a note <a href='#n1'>[1]</a>", "a note [1]"),
        ("<div hidden><table><tr><td>a</table></div>b", "b"),
    ],
)
def test_html_becomes_markdown(body: str, text: str) -> None:
    _, sections = read_html(body.encode())
    assert [section.text for section in sections] == [text]


@pytest.mark.parametrize(
    "heading",
    [
        '<h2 id="a">T</h2>',
        '<section id="a"><h2>T<a href="#a">#</a></h2></section>',
        '<h2>T<span><a class="mark" href="#a" id="a">#</a></span></h2>',
        '<h2><a class="anchor" aria-hidden="true" href="#a"><svg></svg></a>T</h2>',
        '<h2 id="a"><a class="header" href="#a">T</a></h2>',
        '<a name="a"></a><h2>T</h2>',
    ],
)
def test_anchors_of_all_documentation_generators_are_found(heading: str) -> None:
    page = f'<p id="p">before</p><a href="#top"><img></a>{heading}<p>text'
    _, (_, section) = read_html(page.encode())
    assert section == Section(("T",), "## T\n\ntext", "a")


def test_section_of_two_headings_has_the_last_anchor() -> None:
    _, sections = read_html(b"<h1 id=a>A</h1><h2>B</h2><p>b<h2>C</h2><p>c<h2 id=d>D</h2><p>d")
    found = [(section.headings, section.anchor) for section in sections]
    assert found == [(("A", "B"), "a"), (("A", "C"), None), (("A", "D"), "d")]
