"""The lineage of a run: rollback, fork, and the provenance of steps and samples."""
