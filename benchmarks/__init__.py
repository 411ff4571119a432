"""Measurements: speed and memory beside what a PyTorch or JAX user would have instead."""
