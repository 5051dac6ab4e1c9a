"""A server on loopback that answers in JSON."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class JsonServer:
    """Answers each request with `answer(path, body)`: a value of JSON, (status, text[, headers]), or None to hang up. A context
    manager; it keeps the paths and bodies of all requests."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self.answer, self.requests = answer, list[tuple[str, Any]]()

        class Handler(BaseHTTPRequestHandler):
            def log_message(handler, *args: Any) -> None:
                pass

            def do_GET(handler) -> None:
                handler.reply(None)

            def do_POST(handler) -> None:
                handler.reply(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))

            def reply(handler, body: Any) -> None:
                path = handler.path.removeprefix("/")
                self.requests.append((path, body))
                answer = self.answer(path, body)
                if answer is None:
                    handler.close_connection = True
                    return
                status, text, *headers = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
                handler.send_response(status)
                for name, value in {"Content-Length": str(len(text)), **(headers[0] if headers else {})}.items():
                    handler.send_header(name, value)
                handler.end_headers()
                handler.wfile.write(text.encode())

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
