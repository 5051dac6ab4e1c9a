"""Tasks: what is asked, where, and how it is graded."""
