"""Rollouts: prompts in, scored samples out, flat rows for the store."""
