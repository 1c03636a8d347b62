"""The pool that a replica serves: loaded beside the old one, verified, swapped; from a folder or from S3."""
