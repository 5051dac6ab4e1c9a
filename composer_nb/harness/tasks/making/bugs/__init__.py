"""Bugs planted in the source code of a repository."""
