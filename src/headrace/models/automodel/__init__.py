"""Hugging Face causal LMs: from batches to inputs, logprobs, gradients and checkpoints."""
