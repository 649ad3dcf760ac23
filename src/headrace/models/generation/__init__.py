"""Generators: they sample answers from a model."""
