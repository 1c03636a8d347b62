"""The client side of `predict` and `evaluate`: over HTTP, or with a pool on disk."""
