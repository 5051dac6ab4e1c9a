"""Losses, optimizers, packing, router replay and supervised training."""
