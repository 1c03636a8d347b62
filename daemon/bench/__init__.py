"""Benchmarks of serving: HTTP beside the predictor, and beside plain servers."""
