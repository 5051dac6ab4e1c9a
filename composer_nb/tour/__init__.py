"""The default environment of a tour: generated tasks, and the expert that demonstrates them."""
