"""Agentic Transformer: offline training and in-context evaluation on chains of trajectories."""
