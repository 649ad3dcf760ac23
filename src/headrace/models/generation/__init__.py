"""Generators: they sample completions from a model."""
