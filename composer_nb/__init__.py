"""An open laboratory for training coding agents; see docs/architecture.md for the parts."""

__version__ = "0.1.0"
