"""Every error of ttmem has its own exit code, and all are public."""

from __future__ import annotations

import ttmem
from ttmem import TtmemError
from ttmem.cli.main import EPILOG


def test_exit_codes_are_distinct_and_documented() -> None:
    classes = TtmemError.__subclasses__()
    codes = [cls.exit_code for cls in classes]
    assert len(set(codes)) == len(classes) == 11
    assert set(codes) & {0, 1, 2, 130} == set()
    assert TtmemError.exit_code == 1
    for code in codes:
        assert f"{code} " in EPILOG
    for cls in classes:
        assert getattr(ttmem, cls.__name__) is cls


def test_everything_public_is_there() -> None:
    assert sorted(ttmem.__all__) == ttmem.__all__ or len(set(ttmem.__all__)) == len(ttmem.__all__)
    for name in ttmem.__all__:
        assert hasattr(ttmem, name)
