"""A document's memory: ragged keys, values and biases, its file, and its adapter to the transformers cache."""

from ttmem.memory.memory import Memory, MemoryInfo

__all__ = ["Memory", "MemoryInfo"]
