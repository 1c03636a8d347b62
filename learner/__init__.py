"""From labelled shards to a trained task: data, losses, the training loop, evaluation, benchmarks."""
