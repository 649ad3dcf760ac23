"""Language models: training, scoring, sampling, and the policies over them."""
