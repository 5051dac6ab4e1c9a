"""The mixture-of-experts layer."""
