"""Evaluation on held-out images: query tables and tallies for benchmarks, samples and score records for versions."""
