"""The product: an agent that works with `ToolSet.cursor` in a sandbox, on tasks and on a user's own repository, with one loop."""

# Requests that a server answers at a time.
SLOTS = 4
