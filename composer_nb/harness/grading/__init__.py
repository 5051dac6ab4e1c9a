"""Grading: hidden tests, run in a fresh sandbox."""
