"""Training: data packing, optimizers and schedules by name, one loop. It knows nothing of what is trained."""
