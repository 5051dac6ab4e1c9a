"""Weight versions: manifests, files, publishers, receivers."""
