"""A web server on this machine that fails a share of its requests, by a seeded draw."""

import contextlib
import hashlib
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer:
    """Serves bytes by name.

    Attributes:
        url: The address of all files.
        requests: How often each method asked for each file.
        failed: The kinds of failures.
        failed_heads: How often the size of each file was not told.
        sent: How often each file was sent as a whole.
    """

    def __init__(self, files, share=0.0, seed=0):
        self.files, self.share, self.seed = files, share, seed
        self.requests, self.failed = Counter(), Counter()
        self.failed_heads, self.sent = Counter(), Counter()

    def draw(self, *what):
        """Return a number in [0, 1) that depends on the seed and the arguments alone."""
        digest = hashlib.blake2b(repr((self.seed, *what)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    @contextlib.contextmanager
    def running(self):
        handler = type("Handler", (_Handler,), {"owner": self})
        with _Server(("127.0.0.1", 0), handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}/"
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Print nothing when a killed client has closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    owner: WebServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        owner, name = self.owner, self.path.lstrip("/")
        key = (self.command, name)
        owner.requests[key] += 1
        fails = owner.draw(*key, owner.requests[key]) < owner.share
        kind = ["status", "closed", "cut"][int(3 * owner.draw("kind", *key, owner.requests[key]))]
        if fails:
            owner.failed[kind] += 1
            owner.failed_heads[name] += self.command == "HEAD"
        if fails and kind == "closed":
            self.close_connection = True
            return
        data = owner.files.get(name)
        status = 503 if fails and kind == "status" else 404 if data is None else 200
        if status != 200:
            data = b"no"
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            if fails and kind == "cut":
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return
            self.wfile.write(data)
            owner.sent[name] += status == 200

    def log_message(self, *_):
        pass
