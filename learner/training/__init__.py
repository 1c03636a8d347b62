"""The training loop of one task, its checkpoints, and training in several processes."""
