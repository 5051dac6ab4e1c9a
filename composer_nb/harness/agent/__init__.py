"""The agent loop, the policies that take its turns, and their chat formats."""
