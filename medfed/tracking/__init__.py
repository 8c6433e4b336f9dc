"""The round record on disk (the spool) and its copy in MLflow."""
