"""What a replica reports: metrics, heartbeats, drift, agreement of matchers."""
