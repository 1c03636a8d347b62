"""Labelled tasks: manifests, shards, packing, validation, the held-out split."""
