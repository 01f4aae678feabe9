"""`MergeGrids`: tells the mergers which grids the patches lie in, and refuses patches that do not fit their grids.

A vision model hands its mergers all patches of a call as one matrix [N, d], group after group, image after image. Where
a group lies in its image is lost by then. Two hooks on the vision model keep the grids for the length of a call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ttmem.errors import VisionError
from ttmem.regression.convolution import Neighbours, grid_neighbours


class MergeGrids:
    """The grids of the images that are in the vision model now. One call at a time."""

    def __init__(self, merge_size: int, kernel_size: int) -> None:
        self.merge_size, self.kernel_size = merge_size, kernel_size
        self._grids: list[tuple[int, int, int]] | None = None
        self._neighbours: Neighbours | None = None

    def attach(self, visual: nn.Module) -> list[RemovableHandle]:
        """Hook into a vision model; `remove` the handles to leave it as it was."""
        return [
            visual.register_forward_pre_hook(self._enter, with_kwargs=True),
            visual.register_forward_hook(self._leave, always_call=True),
        ]

    def neighbours(self, device: torch.device) -> Neighbours:
        """[taps, N]: the patches around each patch, in the order of the call, each frame on its own."""
        if self._grids is None:
            raise VisionError(
                "a merger with a convolution was called outside its vision model, so that its patches have no grid. "
                "Call the vision model, which hands the grids over."
            )
        if self._neighbours is None or self._neighbours.device != device:
            self._neighbours = self._build(self._grids, device)
        return self._neighbours

    def _build(self, grids: list[tuple[int, int, int]], device: torch.device) -> Neighbours:
        frames = {
            (height, width): grid_neighbours(height, width, self.kernel_size, self.merge_size, device)
            for _, height, width in grids
        }
        parts, start = [torch.empty(self.kernel_size**2, 0, dtype=torch.int64, device=device)], 0
        for time, height, width in grids:
            for _ in range(time):
                frame = frames[height, width]
                parts.append(torch.where(frame < 0, frame, frame + start))
                start += height * width
        return torch.cat(parts, dim=1)

    def _enter(self, visual: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        patches = arguments[0] if arguments else keywords.get("hidden_states")
        grid_thw = keywords.get("grid_thw", arguments[1] if len(arguments) > 1 else None)
        grids = read_grids(grid_thw, self.merge_size)
        check_patches(patches, grids)
        self._grids, self._neighbours = grids, None

    def _leave(self, *_: Any) -> None:
        self._grids = self._neighbours = None


def read_grids(grid_thw: Any, merge_size: int) -> list[tuple[int, int, int]]:
    """(time, height, width) in patches of each image or video. Raises VisionError for a grid that does not divide."""
    if not isinstance(grid_thw, Tensor) or grid_thw.shape[1:] != (3,) or grid_thw.is_floating_point():
        found = f"{list(grid_thw.shape)} of {grid_thw.dtype}" if isinstance(grid_thw, Tensor) else repr(grid_thw)
        raise VisionError(f"grid_thw must hold whole numbers (time, height, width) per image, [n, 3], not {found}.")
    grids = []
    for index, (time, height, width) in enumerate(grid_thw.tolist()):
        if min(time, height, width) < 0 or height % merge_size or width % merge_size:
            raise VisionError(
                f"image {index} has a grid of {height} x {width} patches (and {time} in time), which does not divide "
                f"into groups of {merge_size} x {merge_size}. Its processor must have merge_size {merge_size}: "
                "hand it to ttmem.vision.install, or check it with ttmem.vision.check."
            )
        grids.append((time, height, width))
    return grids


def check_patches(patches: Any, grids: list[tuple[int, int, int]]) -> None:
    """Raise VisionError for another number of patches than the grids', and on CPUs for values that are not finite.

    A GPU would have to be waited for.
    """
    if not isinstance(patches, Tensor):
        raise VisionError("the vision model was called without patches; hand it pixel values [N, values per patch].")
    expected = sum(math.prod(grid) for grid in grids)
    if patches.shape[0] != expected:
        raise VisionError(f"there are {patches.shape[0]} patches, but the grids hold {expected}.")
    if patches.device.type == "cpu" and not bool(patches.isfinite().all()):
        first = int((~patches.flatten(1).isfinite().all(1)).nonzero()[0])
        raise VisionError(
            f"patch {first} has pixels that are not finite (NaN or infinite). Look at how the image was read or scaled."
        )
