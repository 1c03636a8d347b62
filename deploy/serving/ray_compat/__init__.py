"""Workarounds for what Ray has no setting for: loopback, HAProxy, thread priority."""
