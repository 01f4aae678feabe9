"""What the scripts share: fields of a configuration as options."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from ttmem.block_sparse import BlockSparseConfig
from ttmem.errors import TaskError
from ttmem.fast_weights import TTCDConfig


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("projection=False", False), ("projection=false", False), ("projection=True", True), ("windows=None", None),
        ("windows=null", None), ("windows=[8,null]", [8, None]), ("chunk_size=64", 64), ("fast_lr=1e-3", 1e-3),
        ("rule=lact", "lact"), ('rule="lact"', "lact"),
    ],
)  # fmt: skip
def test_a_field_of_a_configuration(text: str, value: Any) -> None:
    from common import field_of

    assert field_of(TTCDConfig)(text) == (text.partition("=")[0], value)


def test_whole_numbers() -> None:
    from common import at_least

    assert at_least(1)("12") == 12
    assert at_least(0)("0") == 0
    for least, text in ((1, "0"), (0, "-1"), (1, "1.5"), (1, "x"), (1, ""), (1, "--2")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"from {least} on"):
            at_least(least)(text)


def test_errors_are_one_line_and_an_exit_code(capsys: Any) -> None:
    from common import run_script

    def fail() -> None:
        raise TaskError("no such file")

    with pytest.raises(SystemExit) as stopped:
        run_script(fail)
    assert stopped.value.code == TaskError.exit_code
    assert capsys.readouterr().err == "error: no such file\n"
    run_script(lambda: None)


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        (TTCDConfig, "projection=no", "projection .bool. takes JSON"),
        (TTCDConfig, "chunk_size=", "chunk_size .int. takes JSON"),
        (TTCDConfig, "fast_layers=0,2", "fast_layers .* takes JSON"),
        (BlockSparseConfig, "sink=off", "sink .bool. takes JSON"),
        (BlockSparseConfig, "compressor_settings=rank", "takes JSON"),
        (TTCDConfig, "chunk=64", "a field of TTCDConfig"),
        (TTCDConfig, "chunk_size", "a field of TTCDConfig"),
    ],
)
def test_what_is_no_field_or_no_value(config: Any, text: str, message: str) -> None:
    """Text in place of a number or a switch would be taken for true."""
    from common import field_of

    with pytest.raises(argparse.ArgumentTypeError, match=message):
        field_of(config)(text)
