"""The daemon's own metrics and probes, read from the ledger at every scrape."""
