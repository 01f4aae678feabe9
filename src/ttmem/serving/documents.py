"""Uploaded documents to text. Runs in the compaction's process, before anything else is loaded there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ttmem.errors import DocumentError

TEXT_KINDS = ("txt", "md")
CONVERTED_KINDS = ("pdf", "html", "docx")
SUFFIXES = {"markdown": "md", "text": "txt", "htm": "html"}
ADDRESS_SPACE = 4 * 2**30
"""Bytes a converter may take; a document made to blow up fails its own job."""

INSTALL = "pip install 'ttmem[documents]'"


def kind_of(filename: str | None, content_type: str | None = None) -> str | None:
    """The kind of a document by its file name's ending, else by its content type; None for another kind."""
    suffix = (filename or "").rpartition(".")[2].lower() if "." in (filename or "") else ""
    suffix = SUFFIXES.get(suffix, suffix)
    if suffix in (*TEXT_KINDS, *CONVERTED_KINDS):
        return suffix
    if suffix:
        return None
    kinds = {"text/plain": "txt", "text/markdown": "md", "text/html": "html", "application/pdf": "pdf"}
    return kinds.get((content_type or "text/plain").partition(";")[0].strip().lower())


def document_text(path: Path, kind: str, most_bytes: int) -> str:
    """The text of a document. Raises DocumentError where it has none, is not what it says, or is too large."""
    if kind in TEXT_KINDS:
        text = decode(path.read_bytes())
    else:
        text = _convert(path, kind)
    if len(text.encode("utf-8", "replace")) > most_bytes:
        raise DocumentError(f"the document's text is larger than the {most_bytes:,} bytes this server takes")
    if not text.strip():
        raise DocumentError("there is no text in the document (scanned pages need text recognition first)")
    return text


def decode(data: bytes) -> str:
    """UTF-8 text, a byte-order mark removed. Raises DocumentError for other bytes."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"the document is not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise DocumentError("the document holds NUL characters: a binary file, or UTF-16")
    return text


def _convert(path: Path, kind: str) -> str:
    """By the converter of this very kind, which reads the file and nothing else: no guessing, no network."""
    try:
        from markitdown import StreamInfo
        from markitdown.converters import DocxConverter, HtmlConverter, PdfConverter
    except ImportError as error:
        raise DocumentError(f"reading {kind} files needs the package 'markitdown' on the server: {INSTALL}") from error
    converters = {"pdf": PdfConverter, "html": HtmlConverter, "docx": DocxConverter}
    try:
        with _limited(), open(path, "rb") as stream:
            converted = converters[kind]().convert(stream, StreamInfo(extension=f".{kind}"))
    except (Exception, RecursionError) as error:  # converters of broken files raise whatever they stumble over
        raise DocumentError(f"the document cannot be read as {kind}: {type(error).__name__}") from error
    return str(converted.markdown)


@contextmanager
def _limited() -> Iterator[None]:
    """Let this process take no more than so much address space meanwhile, where the system can hold it to that."""
    try:
        import resource
    except ImportError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(ADDRESS_SPACE, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
