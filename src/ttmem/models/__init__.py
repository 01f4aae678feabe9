"""Models: loading them, knowing them again, and what a layer's projections are."""

from ttmem.models.loading import load_model
from ttmem.models.model import ANSWER_ROOM, Model

__all__ = ["ANSWER_ROOM", "Model", "load_model"]
