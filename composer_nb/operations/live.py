"""A page that shows a live run: its state and time left, its scores and curves, the work in flight, rollouts and other runs.

    with LivePage(run.path) as page:
        print(page.url)

The page is served on this machine's loopback only, and only reads the run's folder and those beside it. Its front end is that of
JupyterLab (`views/desk.js`), with requests in place of a kernel's messages. After the run, `report.html` remains.
"""

from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from composer_nb.production.serve import ThreadServer
from composer_nb.views.charts import script
from composer_nb.views.dashboard import FRONT_END, STYLES, Desk
from composer_nb.views.page import STYLE, document

# Content policy: a page with text from models loads nothing from elsewhere and evaluates no text.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'self'; connect-src 'self'"
_REQUESTS = Path(__file__).with_name("live.js").read_text(encoding="utf-8")


class LivePage(ThreadServer):
    """A page at `url` that follows the run in `path`. This is a context manager.

    Raises ValueError for a port that is in use."""

    def __init__(self, path: Path, port: int = 0) -> None:
        """`port`: 0 means any free port."""
        self.path, self._desk = path, Desk(path)
        routes = [Route("/", self._page), Route("/desk.js", _script), Route("/ask/{name}", self._answer)]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        super().__init__(Starlette(routes=routes, middleware=[hosts]), "127.0.0.1", port, timeout_graceful_shutdown=1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"

    def _page(self, request: Request) -> Response:
        styles = f"{STYLE}<style>{STYLES} body {{ max-width: 120rem }}</style>"
        body = [styles, "<div id=desk></div>", "<script type=module src=desk.js></script>"]
        return HTMLResponse(document(self.path.name, body), headers={"Content-Security-Policy": POLICY})

    def _answer(self, request: Request) -> Response:
        """Answer what the page itself asks, and no other site."""
        name, site = request.path_params["name"], request.headers.get("Sec-Fetch-Site", "same-origin")
        if name not in Desk.ASKS or site != "same-origin":
            return JSONResponse({"error": f"{name}: nothing to answer"}, status_code=404)
        return JSONResponse(self._desk.answer(name, request.query_params))


def _script(request: Request) -> Response:
    return Response(f"{script()}\n{FRONT_END}\n{_REQUESTS}", media_type="text/javascript")
