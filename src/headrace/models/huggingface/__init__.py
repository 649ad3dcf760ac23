"""The shapes in which Hugging Face models take packed sequences."""
