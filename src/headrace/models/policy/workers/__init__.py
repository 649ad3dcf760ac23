"""One rank of a policy, by kind of trainer."""
