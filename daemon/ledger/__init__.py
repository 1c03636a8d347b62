"""The state of every task and version: one SQLite file, changed by compare-and-set."""
