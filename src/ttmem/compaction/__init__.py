"""A document becomes a memory: one module per step, one per method."""
