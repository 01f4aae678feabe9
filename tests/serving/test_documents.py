"""Documents to text: the kinds by their names, real files of each, and files that are not what they say."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from ttmem import DocumentError
from ttmem.serving.documents import decode, document_text, kind_of

PARAGRAPH = "The ferry to Lerwick leaves at nine on Mondays."

DOCX = {
    "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.'
    'wordprocessingml.document.main+xml"/></Types>',
    "_rels/.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship '
    'Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>',
    "word/document.xml": '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
    f"<w:p><w:r><w:t>{PARAGRAPH}</w:t></w:r></w:p></w:body></w:document>",
}


def docx(parts: dict[str, str] = DOCX) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def pdf(text: str) -> bytes:
    """One page with one line, as plain as the format allows."""
    content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n" % len(content) + content + b"\nendstream",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    start = len(data)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    tail = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start)
    return data + head + table + tail


@pytest.mark.parametrize(
    ("name", "content_type", "kind"),
    [
        ("a.txt", None, "txt"),
        ("A.PDF", "text/plain", "pdf"),
        ("a.htm", None, "html"),
        ("a.markdown", None, "md"),
        ("a.b.docx", None, "docx"),
        ("a.exe", "text/plain", None),
        ("a.doc", None, None),
        ("noending", None, "txt"),
        (None, "application/pdf", "pdf"),
        ("noending", "text/html; charset=utf-8", "html"),
        ("noending", "application/zip", None),
        ("../../x.txt", None, "txt"),
    ],
)
def test_kinds(name: str | None, content_type: str | None, kind: str | None) -> None:
    assert kind_of(name, content_type) == kind


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("txt", PARAGRAPH.encode()),
        ("md", b"\xef\xbb\xbf" + PARAGRAPH.encode()),
        ("html", f"<html><script>no()</script><body><p>{PARAGRAPH}</p></body></html>".encode()),
        ("docx", docx()),
        ("pdf", pdf(PARAGRAPH)),
    ],
)
def test_text_of_each_kind(tmp_path: Path, kind: str, data: bytes) -> None:
    (tmp_path / "source").write_bytes(data)
    assert document_text(tmp_path / "source", kind, 10**6).strip() == PARAGRAPH


ENTITIES = '<!DOCTYPE w [<!ENTITY a "aaaaaaaaaa">' + "".join(
    f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9)
)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("docx", b"not a zip"),
        ("docx", docx({"word/document.xml": ENTITIES + "]><w>&j;</w>"})),
        ("docx", docx({**DOCX, "word/document.xml": "<open>"})),
        ("pdf", b"%PDF-1.4 and nothing more"),
        ("pdf", b""),
        ("html", b"<html><body></body></html>"),
        ("txt", b" \n "),
        ("txt", b"\xff\xfe"),
    ],
)
def test_what_gives_no_text_is_refused(tmp_path: Path, kind: str, data: bytes) -> None:
    (tmp_path / "source").write_bytes(data)
    with pytest.raises(DocumentError) as refused:
        document_text(tmp_path / "source", kind, 10**6)
    assert str(tmp_path) not in str(refused.value)


def test_too_large_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("é" * 100)
    assert len(document_text(tmp_path / "source", "txt", 200)) == 100
    with pytest.raises(DocumentError, match="larger"):
        document_text(tmp_path / "source", "txt", 199)
    with pytest.raises(DocumentError):
        decode(b"a\0b")
