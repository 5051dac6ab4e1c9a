"""The tool `web_search` on recorded pages: a stub of the web that answers every rollout alike and fetches nothing.

A record is a JSON Lines file with the `url`, `title` and `text` of each page.
"""

import threading
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from composer_nb.harness.search.index import CodeIndex
from composer_nb.harness.tools.arguments import Text, tool
from composer_nb.harness.tools.search import Pattern
from composer_nb.harness.tools.session import Observation, Session, clean, file_lines

PAGES = 5  # passages of an answer


class WebPage(BaseModel):
    """A recorded page."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    title: str
    text: str


class WebPages:
    """Recorded pages and their index. Thread-safe."""

    def __init__(self, pages: list[WebPage]) -> None:
        self.by_url = {page.url: page for page in pages}
        self._by_file = {f"{number}.md": page for number, page in enumerate(pages)}
        texts = {name: f"# {page.title}\n\n{page.text}".encode() for name, page in self._by_file.items()}
        self._index, self._lock = CodeIndex.build(texts), threading.Lock()

    def search(self, query: str) -> list[tuple[WebPage, str]]:
        """Return pages with the passage of each that fits best."""
        with self._lock:
            hits = self._index.search(query, [], 4 * PAGES)
        best = {hit.path: hit.text for hit in reversed(hits)}
        return [(self._by_file[path], best[path]) for path in dict.fromkeys(hit.path for hit in hits)][:PAGES]


@lru_cache(maxsize=4)
def read_pages(path: str) -> WebPages | None:
    """Read a record; None for an empty path. Raises ValueError, which names the setting and the line, if it is wrong."""
    if not path:
        return None
    pages: list[WebPage] = []
    try:
        for line in file_lines(Path(path).expanduser().read_text("utf-8")):
            pages.append(WebPage.model_validate_json(line))
    except OSError as error:
        raise ValueError(f"env.web={path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(
            f"env.web={path}:{len(pages) + 1}: a line needs url, title and text as JSON, in UTF-8"
        ) from None
    return WebPages(pages)


@tool()
def web_search(session: Session, search_term: Pattern, explanation: Text | None = None) -> Observation:
    """Search the web. Shows a passage of each page that fits best; a URL as the search term shows the whole page.

    search_term: Words or a question, or the URL of a page.
    explanation: One sentence: why you make this call.
    """
    assert session.web is not None  # the tool is offered only with pages
    page = session.web.by_url.get(search_term.strip())
    passages = [(page, page.text)] if page else session.web.search(search_term)
    blocks = [f"{page.url}\n{page.title}\n{text.rstrip()}" for page, text in passages]
    return Observation(text=clean("\n\n".join(blocks or ["(nothing found)"]).encode()))
