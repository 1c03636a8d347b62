"""Ray as the daemon uses it: its own head or an external cluster, monitored and repaired."""
