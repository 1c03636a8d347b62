"""MLflow: training runs, versions, the serving alias, and rebuilding a lost state directory from it."""
