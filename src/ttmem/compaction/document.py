"""A document: text, tokens, and the checks that come before any computing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ttmem.errors import DocumentError
from ttmem.models import ANSWER_ROOM, Model


@dataclass
class Document:
    """A text and its token ids [N] for one model."""

    name: str
    sha256: str
    ids: Tensor

    @classmethod
    def of(cls, model: Model, text: str, name: str = "text") -> Document:
        """Tokenize raw text. Raises DocumentError when it is empty or longer than the model's positions.

        Text that looks like a special token ("<|im_end|>") is read as plain text, never as the token.
        """
        if not text.strip():
            raise DocumentError(f"{name}: the document is empty")
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise DocumentError(f"{name}: not valid text: it holds a lone surrogate, which no encoding can write")
        ids = model.encode(text)
        limit = model.max_positions
        if limit is not None and len(ids) + ANSWER_ROOM > limit:
            raise DocumentError(
                f"{name}: the document has {len(ids):,} tokens, and {model.name} reaches {limit:,} positions, of which "
                f"{ANSWER_ROOM} are kept for questions and answers: cut it to {limit - ANSWER_ROOM:,} tokens, split "
                "it, or use a model with a longer context"
            )
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(name, digest, torch.tensor(ids))

    @property
    def length(self) -> int:
        return self.ids.shape[0]


def read_text(path: str | PathLike[str]) -> str:
    """The text of a UTF-8 file, a byte-order mark removed. Raises DocumentError when it is missing or not UTF-8."""
    try:
        data = Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        raise DocumentError(
            f"{path}: not UTF-8 (byte {error.start}: 0x{data[error.start]:02x}): convert it, for example with "
            f"`iconv -f {encoding} -t utf-8`"
        ) from error
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror or error}") from error
    if "\0" in text:
        raise DocumentError(f"{path}: holds NUL characters: a binary file, or UTF-16 (`iconv -f utf-16 -t utf-8`)")
    return text
