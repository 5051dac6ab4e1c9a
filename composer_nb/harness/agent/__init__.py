"""The agent loop, the policies that it asks, and the formats in which they read and write."""
