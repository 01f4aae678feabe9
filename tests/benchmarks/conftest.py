"""The benchmark scripts import each other from their own folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="package", autouse=True)
def from_the_scripts_folder() -> Iterator[None]:
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not here")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield
