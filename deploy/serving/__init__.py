"""Ray Serve application: replicas that load a pool, answer over HTTP, and follow CURRENT."""
