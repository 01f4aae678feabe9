"""Errors a user can act on. Each says what was wrong, with which value, and what to do.

The command line maps every class to the exit code in `exit_code`; anything else is a bug of ttmem.
"""

from __future__ import annotations


class TtmemError(Exception):
    """Base class of every error that ttmem raises on purpose."""

    exit_code = 1


class ModelError(TtmemError):
    """A model that cannot be loaded, or whose architecture cannot carry a compacted memory."""

    exit_code = 3


class DocumentError(TtmemError):
    """A document that cannot be compacted: empty, too long, not text."""

    exit_code = 4


class BudgetError(TtmemError):
    """A ratio, token budget or setting outside its range."""

    exit_code = 5


class MemoryFileError(TtmemError):
    """A memory file that is missing, damaged, altered or of a newer format."""

    exit_code = 6


class MemoryMismatchError(TtmemError):
    """A sound memory used with another model or tokenizer than it was made for, or used wrongly."""

    exit_code = 7


class QuestionError(TtmemError):
    """A question that cannot be asked: empty, not text, or beyond the model's positions."""

    exit_code = 9


class TaskError(TtmemError):
    """A benchmark task that is unknown, misses its data, or cannot be built at the length asked for."""

    exit_code = 10


class ResumeError(TtmemError):
    """Partial work that does not belong to this document, model or these settings."""

    exit_code = 8


class BlockError(TtmemError):
    """Tokens that a compressor or an attention cannot take: shapes or windows that do not fit, no finite number."""

    exit_code = 11


class VisionError(TtmemError):
    """A vision-language model, its processor and its images that do not fit each other."""

    exit_code = 12


class ServeError(TtmemError):
    """A server that cannot start: its address, its keys, its data folder, or a package that is missing."""

    exit_code = 13
