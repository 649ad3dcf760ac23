"""Batches, the microbatch planner, ranks and collectives; torch is the only heavy import."""
