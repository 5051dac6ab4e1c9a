"""Studies of number formats."""
