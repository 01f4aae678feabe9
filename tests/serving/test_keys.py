"""Keys: files of them, owners, and addresses that need them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttmem import ServeError
from ttmem.serving.keys import LOCAL, Keys
from ttmem.serving.server import bind, check_address, is_loopback
from ttmem.serving.settings import ServeSettings

KEY = "sk-0123456789abcdef"


def test_owners(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# ours\nalice {KEY}\n\n{KEY}2\nmetrics {KEY}3\n")
    keys = Keys.read(tmp_path / "keys")
    assert keys.owner(f"Bearer {KEY}") == "name:alice"
    assert keys.owner(f"bearer {KEY}") == "name:alice"
    second = keys.owner(f"Bearer {KEY}2")
    assert second is not None
    assert KEY not in second
    for wrong in (None, "", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}4", f"Bearer {KEY[:-1]}", "Bearer \udcff"):
        assert keys.owner(wrong) is None
    assert keys.may_read_metrics("name:metrics")
    assert not keys.may_read_metrics("name:alice")


def test_without_keys_everyone_is_local() -> None:
    keys = Keys.read(None)
    assert keys.owner(None) == LOCAL
    assert keys.may_read_metrics(LOCAL)


@pytest.mark.parametrize("text", ["", "# none\n", "short\n", f"a b {KEY}\n", f"no/slash {KEY}\n", f"{KEY}\n{KEY}\n"])
def test_files_that_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ServeError):
        Keys.read(tmp_path / "keys")
    with pytest.raises(ServeError):
        Keys.read(tmp_path / "none")


def test_only_loopback_goes_without_keys(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "127.1.2.3", "::1"):
        assert is_loopback(host)
        check_address(ServeSettings(tmp_path, host=host))
    for host in ("0.0.0.0", "::", "10.0.0.1", "no such host"):
        assert not is_loopback(host)
        with pytest.raises(ServeError, match="--api-key-file"):
            check_address(ServeSettings(tmp_path, host=host))
        check_address(ServeSettings(tmp_path, host=host, key_file=tmp_path / "keys"))


def test_a_port_that_is_taken_is_refused() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ServeError, match="cannot listen"):
            bind("127.0.0.1", first.getsockname()[1])
    with pytest.raises(ServeError):
        bind("192.0.2.1", 0)
