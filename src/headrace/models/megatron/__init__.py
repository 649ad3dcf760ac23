"""Megatron-Core models."""
