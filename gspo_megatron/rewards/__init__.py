"""Rewards: (Prompt, response text) -> float, one module per kind of task."""
