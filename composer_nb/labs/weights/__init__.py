"""Studies of weight deltas."""
