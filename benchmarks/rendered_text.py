"""Rendered digits: a small bitmap font, pictures of one line, and their patches as Qwen3-VL's processor orders them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GLYPHS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
"""Rows from top to bottom, 5 x 7 pixels."""
CHARACTERS = "".join(GLYPHS)
GLYPH_HEIGHT, GLYPH_WIDTH = 7, 5
PITCH = GLYPH_WIDTH + 1

_BITMAPS = np.array([[[int(bit) for bit in row] for row in glyph.split()] for glyph in GLYPHS.values()], np.float32)


def render(
    rng: np.random.Generator, indices: np.ndarray, height: int, width: int, noise: float, spread: float = 1.0
) -> np.ndarray:
    """One line of `CHARACTERS`, by their indices, on a ground with noise: [height, width] in about 0 to 1.

    spread: how far from the middle the line may lie, 0 to 1; 1 is anywhere.
    """
    line = np.zeros((GLYPH_HEIGHT, PITCH * len(indices)), np.float32)
    for place, index in enumerate(indices):
        line[:, place * PITCH : place * PITCH + GLYPH_WIDTH] = _BITMAPS[index]
    picture = rng.normal(0.0, noise, (height, width)).astype(np.float32)
    top, left = (
        round((room - taken) * (0.5 + spread * (rng.random() - 0.5)))
        for room, taken in ((height, line.shape[0]), (width, line.shape[1]))
    )
    picture[top : top + line.shape[0], left : left + line.shape[1]] += line
    return picture


def patchify(pictures: Tensor, patch: int, merge: int) -> Tensor:
    """[B, height, width] in one channel -> [B, patches, patch ** 2], group after group of merge x merge patches."""
    count, height, width = pictures.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    grid = pictures.view(count, rows, merge, patch, columns, merge, patch)
    return grid.permute(0, 1, 4, 2, 5, 3, 6).reshape(count, rows * columns * merge**2, patch**2)


def batch(
    seed: tuple[int, ...], count: int, length: int, height: int, width: int, noise: float, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Pictures [count, height, width] in about -1 to 1, and what they say, [count, length] of `CHARACTERS`."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, len(CHARACTERS), (count, length))
    pictures = np.stack([render(rng, line, height, width, noise, spread) for line in indices])
    return torch.from_numpy(2.0 * pictures - 1.0), torch.from_numpy(indices)
