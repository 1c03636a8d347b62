"""The bucket of task shards, a local folder or an object store: finding, reading and cleaning up tasks."""
