"""The loss bench: published policy-gradient losses on a stored batch."""
