"""Attacks on sandboxes and graders."""
