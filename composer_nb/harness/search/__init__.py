"""Search by meaning over a repository, for the tool `codebase_search`. `index.py` has the entry, `docs/search.md` the figures.

From the bottom: text as terms (`terms.py`), files as chunks (`languages.py`, `chunks.py`), which files count (`ignore.py`),
chunks as something to rank (`segment.py`, `embedding.py`), an index with edits laid over it (`index.py`), its cache (`cache.py`).
Beside it: questions with known answers (`questions.py`, `traces.py`) and how well they are answered (`measure.py`).
"""
