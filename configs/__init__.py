"""Hydra's yaml files, one per command, and their groups."""
