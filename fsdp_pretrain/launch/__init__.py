"""Starts torchrun, and restarts it unless that is pointless."""
