"""What every store shares: partitions of rows, their columns, chunks, groups, lengths and claims."""
