"""headrace: a data plane for LLM reinforcement-learning post-training, with the trainers that use it."""

__version__ = "0.1.0"
