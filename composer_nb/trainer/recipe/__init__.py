"""The recipe: stages from an empty directory to a trained policy and its report."""
