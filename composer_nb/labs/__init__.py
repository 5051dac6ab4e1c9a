"""Studies that notebooks call and training never does."""
