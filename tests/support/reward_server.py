"""A reward server that can go away and come back."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pipeline


class Server:
    """A reward server on its own port, which can go away and come back.

    It gives `answers` in turn, and repeats the last one. An answer is (status, body), None to hang, or a function that
    makes the answer to a request.
    """

    def __init__(self, *answers, host: str = "127.0.0.1") -> None:
        self.answers, self.requests, self._host = list(answers), [], host
        self.port = pipeline.free_port()
        self.url = f"http://127.0.0.1:{self.port}/get_reward"
        self.running = None

    def start(self) -> "Server":
        owner, over = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.requests.append(asked)
                answer = owner.answers.pop(0) if len(owner.answers) > 1 else owner.answers[0]
                answer = answer(asked) if callable(answer) else answer
                if answer is None:
                    over.wait()
                    return
                status, body = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_): ...

        self.running, self.over = ThreadingHTTPServer((self._host, self.port), Handler), over
        threading.Thread(target=self.running.serve_forever, daemon=True).start()
        return self

    def stop(self) -> None:
        self.over.set()
        self.running.shutdown()
        self.running.server_close()
