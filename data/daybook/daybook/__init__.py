"""Days, amounts and the lines of a daybook."""
