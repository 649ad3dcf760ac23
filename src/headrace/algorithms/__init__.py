"""GRPO and its parts: rewards, advantages, dynamic sampling, losses, and the loops that put them in order."""
