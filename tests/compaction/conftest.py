"""What several tests of compaction start from."""

from __future__ import annotations

from typing import Any

import pytest

from ttmem.compaction.prepared import Prepared


@pytest.fixture(scope="module", params=["model", "gemma"])
def prepared(request: pytest.FixtureRequest, make_prepared: Any) -> Prepared:
    """A document of a model with global layers only, and of one with windows."""
    found: Prepared = make_prepared(request.getfixturevalue(request.param))
    return found
