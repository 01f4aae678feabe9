"""Models: loading them, knowing them again, and what a layer's projections are."""

from ttmem.models.loading import load_model
from ttmem.models.model import Model

__all__ = ["Model", "load_model"]
