"""The long-running daemon and its command line."""
