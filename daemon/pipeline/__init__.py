"""From a task in the bucket to a served version: discovery, jobs, publishing, operator commands."""
