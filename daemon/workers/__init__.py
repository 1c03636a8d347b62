"""Running jobs: in this process, or as Ray actors."""
