"""Writes small PDF, DOCX, ODT and PPTX files."""

import io
import zipfile
import zlib
from collections.abc import Iterable, Sequence

_OFFICE = "http://schemas.openxmlformats.org"
_WORD = f"{_OFFICE}/wordprocessingml/2006/main"
_RELATIONS = f"{_OFFICE}/officeDocument/2006/relationships"
_PACKAGE = f"{_OFFICE}/package/2006"
_CELL = '<w:tc><w:p><w:r><w:t xml:space="preserve">{}</w:t></w:r></w:p></w:tc>'
_ODT = "urn:oasis:names:tc:opendocument:xmlns"


def make_pdf(pages: Sequence[Sequence[str]], title: str = "", trailer: str = "") -> bytes:
    """Write a PDF with these lines on its pages."""
    contents = []
    for lines in pages:
        shown = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
        contents.append(f"BT /F 12 Tf 72 700 Td {shown} ET".encode("cp1252") if lines else b"")
    return pdf_of_contents(contents, title, trailer)


def pdf_of_contents(
    contents: Sequence[bytes], title: str = "", trailer: str = "", filters: str = ""
) -> bytes:
    """Write a PDF whose pages are drawn by these instructions."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(contents)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(contents)}>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for number, content in enumerate(contents):
        page = f"/MediaBox[0 0 612 792]/Contents {5 + 2 * number} 0 R"
        objects.append(f"<</Type/Page/Parent 2 0 R{page}/Resources<</Font<</F 3 0 R>>>>>>".encode())
        head = f"<<{filters}/Length {len(content)}>>stream\n".encode()
        objects.append(head + content + b"\nendstream")
    objects.append(f"<</Title({title})>>".encode())
    file, offsets = b"%PDF-1.7\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<</Size {size}/Root 1 0 R"
    end += f"/Info {size - 1} 0 R{trailer}>>\nstartxref\n{len(file)}\n%%EOF\n"
    return file + end.encode()


def deflated(pieces: Iterable[bytes]) -> bytes:
    """Compress these pieces for `/Filter/FlateDecode`."""
    compress = zlib.compressobj(9)
    return b"".join(map(compress.compress, pieces)) + compress.flush()


def make_docx(body: Iterable[str]) -> bytes:
    """Write a DOCX with this XML as its body, which is streamed."""
    content_type = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    styles = f'<w:style w:type="paragraph" w:styleId="berschrift1" xmlns:w="{_WORD}">'
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{content_type}.document.main+xml"/>'
        f'<Override PartName="/word/styles.xml" ContentType="{content_type}.styles+xml"/></Types>',
        "_rels/.rels": _relation("officeDocument", "word/document.xml"),
        "word/_rels/document.xml.rels": _relation("styles", "styles.xml"),
        # The name in a German Word.
        "word/styles.xml": f'<w:styles xmlns:w="{_WORD}">{styles}<w:name w:val="heading 1"/>'
        "</w:style></w:styles>",
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as package:
        for name, content in parts.items():
            package.writestr(name, content)
        with package.open("word/document.xml", "w", force_zip64=True) as document:
            document.write(f'<w:document xmlns:w="{_WORD}"><w:body>'.encode())
            for piece in body:
                document.write(piece.encode())
            document.write(b"</w:body></w:document>")
    return file.getvalue()


def _relation(kind: str, target: str) -> str:
    return (
        f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="r1" '
        f'Type="{_RELATIONS}/{kind}" Target="{target}"/></Relationships>'
    )


def paragraph(text: str, style: str = "") -> str:
    """Return the XML of a paragraph in a DOCX."""
    styled = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{styled}<w:r><w:t>{text}</w:t></w:r></w:p>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the XML of a table in a DOCX."""
    lines = "".join(f"<w:tr>{''.join(map(_CELL.format, row))}</w:tr>" for row in rows)
    return f"<w:tbl>{lines}</w:tbl>"


def make_odt(heading: str, text: str) -> bytes:
    """Write an ODT with one heading and one paragraph."""
    names = f'xmlns:office="{_ODT}:office:1.0" xmlns:text="{_ODT}:text:1.0"'
    body = f'<text:h text:outline-level="1">{heading}</text:h><text:p>{text}</text:p>'
    content = f"<office:body><office:text>{body}</office:text></office:body>"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as package:
        package.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        package.writestr(
            "content.xml", f"<office:document-content {names}>{content}</office:document-content>"
        )
    return file.getvalue()


def make_pptx(title: str, text: str) -> bytes:
    """Write a PPTX with one slide."""
    drawing, slides = f"{_OFFICE}/drawingml/2006/main", f"{_OFFICE}/presentationml/2006/main"
    names = f'xmlns:a="{drawing}" xmlns:p="{slides}" xmlns:r="{_RELATIONS}"'
    shapes = "".join(
        f'<p:sp><p:nvSpPr><p:cNvPr id="{number}" name="{number}"/><p:cNvSpPr/><p:nvPr>'
        f"<p:ph{kind}/></p:nvPr></p:nvSpPr><p:spPr/><p:txBody><a:bodyPr/><a:p><a:r><a:t>{shown}"
        "</a:t></a:r></a:p></p:txBody></p:sp>"
        for number, (kind, shown) in enumerate(((' type="title"', title), (' idx="1"', text)), 2)
    )
    content_type = "application/vnd.openxmlformats-officedocument.presentationml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/ppt/presentation.xml" ContentType="{content_type}.presentation.'
        'main+xml"/><Override PartName="/ppt/slides/slide1.xml" '
        f'ContentType="{content_type}.slide+xml"/></Types>',
        "_rels/.rels": _relation("officeDocument", "ppt/presentation.xml"),
        "ppt/_rels/presentation.xml.rels": _relation("slide", "slides/slide1.xml"),
        "ppt/presentation.xml": f'<p:presentation {names}><p:sldIdLst><p:sldId id="256" r:id="r1"/>'
        "</p:sldIdLst></p:presentation>",
        "ppt/slides/slide1.xml": f"<p:sld {names}><p:cSld><p:spTree>{shapes}</p:spTree></p:cSld>"
        "</p:sld>",
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as package:
        for name, content in parts.items():
            package.writestr(name, content)
    return file.getvalue()
