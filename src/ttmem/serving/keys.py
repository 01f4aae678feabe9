"""API keys: who asks, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from ttmem.errors import ServeError

LOCAL = "local"
"""The owner of everything on a server without keys."""

METRICS = "metrics"
"""The name of a key that opens /metrics and nothing else."""

SHORTEST = 16


@dataclass(frozen=True)
class Keys:
    """Digests of the keys and the owners they stand for. Without keys, everyone is `LOCAL`."""

    owners: tuple[tuple[bytes, str], ...] = ()

    @classmethod
    def read(cls, path: Path | None) -> Keys:
        """Keys of a file: one per line, or `NAME KEY`; lines with # are comments.

        What a key has made belongs to its name, or to the key itself where it has none: with a name, a key can be
        replaced. Raises ServeError for a missing file, a short key, one twice, or no key at all.
        """
        if path is None:
            return cls()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ServeError(f"cannot read the keys in {path}: {error}") from error
        owners: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            parts = line.split()
            if not parts or parts[0].startswith("#"):
                continue
            if len(parts) > 2 or len(parts[-1]) < SHORTEST:
                raise ServeError(
                    f"{path}, line {number}: not a key: write `KEY` or `NAME KEY`, with a key of at least {SHORTEST} "
                    "characters without spaces (for example from `openssl rand -hex 24`)"
                )
            if len(parts) == 2 and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", parts[0]):
                raise ServeError(f"{path}, line {number}: a key's name has letters, digits, dots, dashes only")
            digest = _digest(parts[-1])
            if digest in owners:
                raise ServeError(f"{path}, line {number}: this key is there twice")
            owners[digest] = f"name:{parts[0]}" if len(parts) == 2 else f"key:{digest.hex()[:32]}"
        if not owners:
            raise ServeError(f"{path}: there is no key in it")
        return cls(tuple(owners.items()))

    @property
    def needed(self) -> bool:
        return bool(self.owners)

    def owner(self, authorization: str | None) -> str | None:
        """The owner an `Authorization: Bearer KEY` header stands for, None for none.

        Every key is compared, always, digest against digest: how long it takes tells nothing about them.
        """
        if not self.needed:
            return LOCAL
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found = None
        for digest, owner in self.owners:
            if hmac.compare_digest(digest, given):
                found = owner
        return found if scheme.lower() == "bearer" else None

    def may_read_metrics(self, owner: str) -> bool:
        """/metrics counts over all keys, so that with keys it takes the one named `metrics`."""
        return not self.needed or owner == f"name:{METRICS}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
