"""Asynchronous RL as services: coordinator, inference, environments, trainer."""

# Exit status of services whose Ray cluster died (EX_TEMPFAIL): the launcher starts them again.
LOST = 75
