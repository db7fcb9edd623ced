"""Seal rollouts, score them with the reward script, close their groups."""
