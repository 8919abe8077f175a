"""Training health: anomaly rules on step metrics, incidents, automatic rollbacks."""
