"""Figures and widgets of the notebooks."""
