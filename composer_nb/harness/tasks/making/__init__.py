"""Tasks made from a Python repository with a pytest suite."""
