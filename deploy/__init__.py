"""Serving over HTTP, and the files an operator installs."""
