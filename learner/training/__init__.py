"""The training loop of one task, its checkpoints and its team."""
