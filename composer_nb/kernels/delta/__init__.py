"""Codec of weight deltas."""
