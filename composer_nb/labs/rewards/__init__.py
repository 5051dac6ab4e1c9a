"""The reward lab: a stored batch under another reward."""
