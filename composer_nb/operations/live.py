"""A page that shows a live run: its state and time left, its curves, the work in flight, and rollouts to read.

    with LivePage(run.path) as page:
        print(page.url)

The page is served on this machine's loopback only, and only reads the run's folder. After the run, `report.html` remains.
"""

from __future__ import annotations

import html
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from composer_nb.production.serve import ThreadServer
from composer_nb.trainer.recipe.reader import ReadOnly, read_status
from composer_nb.views import dashboard
from composer_nb.views.page import document, image
from composer_nb.views.rollout import StoredRollout, read, sampled

# Content policy: a page with text from models loads nothing from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'; connect-src 'self'"
_BODY = Path(__file__).with_name("live.html").read_text(encoding="utf-8")


class LivePage(ThreadServer):
    """A page at `url` that follows the run in `path`. This is a context manager.

    Raises ValueError for a port that is in use."""

    def __init__(self, path: Path, port: int = 0) -> None:
        """`port`: 0 means any free port."""
        self.path = path
        self._lock, self._picture, self._rest_until = threading.Lock(), "", 0.0
        self._drawn: tuple[Any, ...] | None = None
        self._rollouts: list[StoredRollout] = []
        routes = [
            Route("/", self._page),
            Route("/board", self._board),
            Route("/rollouts", self._listed),
            Route("/rollouts/{place:int}", self._read),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        super().__init__(Starlette(routes=routes, middleware=[hosts]), "127.0.0.1", port, timeout_graceful_shutdown=1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"

    def _page(self, request: Request) -> Response:
        heading = f"<h1>{html.escape(self.path.name)}</h1>"
        return HTMLResponse(document(self.path.name, [heading, _BODY]), headers={"Content-Security-Policy": POLICY})

    def _board(self, request: Request) -> Response:
        """Return the board. Pictures are redrawn after a change, in at most a fifth of the time: the run needs the processors."""
        with self._lock:
            status, began = read_status(self.path), time.monotonic()
            if (state := dashboard.pictured(status)) != self._drawn and began >= self._rest_until:
                self._picture, self._drawn = image(dashboard.headline(status), dashboard.picture(status).png()), state
                ended = time.monotonic()
                self._rest_until = ended + (ended - began) / dashboard.SHARE
            return HTMLResponse(f"{dashboard.head(status).text}<div>{self._picture}</div>")

    def _listed(self, request: Request) -> Response:
        with self._lock:
            self._rollouts = []
            with suppress(ValueError, FileNotFoundError):  # no step yet
                self._rollouts = sampled(ReadOnly(self.path))
            texts = [html.escape(rollout.heading) for rollout in self._rollouts]
        return HTMLResponse("".join(f'<option value="{at}">{text}</option>' for at, text in enumerate(texts)))

    def _read(self, request: Request) -> Response:
        index = request.path_params["place"]
        with self._lock:
            if index >= len(self._rollouts):
                return HTMLResponse("RL has made no step yet", status_code=404)
            return HTMLResponse(read(self._rollouts[index]).text)
