"""Policies: what the driver calls, and the workers behind it."""
