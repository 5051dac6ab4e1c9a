"""Auditing a set of tasks or an environment before it trains anything."""
