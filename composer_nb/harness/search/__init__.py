"""Code search for the tool `codebase_search`: `index.CodeIndex`. `scripts/retrieval` measures it and trains its embedding."""
