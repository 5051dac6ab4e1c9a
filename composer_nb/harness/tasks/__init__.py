"""Tasks: instructions, workspaces and graders."""
