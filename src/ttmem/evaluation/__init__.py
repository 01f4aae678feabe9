"""Measuring memories against the full context."""
