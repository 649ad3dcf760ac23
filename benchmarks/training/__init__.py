"""What `train.py` compares: one batch, headrace's worker, and the same update written by others."""
