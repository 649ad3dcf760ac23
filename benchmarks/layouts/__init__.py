"""What `scaling.py` runs on every rank: models and rows, two ways to train, and what a profile says of them."""
