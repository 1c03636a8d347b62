"""Benchmarks: accuracy over a stream of tasks, speed of matching and of training."""
