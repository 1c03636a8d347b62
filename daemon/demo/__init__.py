"""The demo: a real daemon that learns sketches or your own images while you watch."""
