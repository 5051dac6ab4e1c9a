"""Training: models, learning, weight versions, parallelism, services, the recipe."""
