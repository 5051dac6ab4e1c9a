"""Terms of rewards: their registry, and further ones, which are imported once a weight names one."""
