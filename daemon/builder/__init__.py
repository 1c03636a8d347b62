"""Building the next pool version: one task more or less, evaluated, gated, smoke-tested."""
