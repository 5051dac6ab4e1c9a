"""Attention within rows, and on a key-value cache."""
