"""What status, versions and report show: figures of the served version."""
