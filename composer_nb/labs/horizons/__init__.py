"""Long rollouts: forks from a turn, hints at a turn, what a summary keeps."""
