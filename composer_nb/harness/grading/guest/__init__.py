"""Programs that run inside a grading sandbox."""
