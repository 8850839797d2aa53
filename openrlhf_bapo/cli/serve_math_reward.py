"""Serves the math grader over HTTP in OpenRLHF's protocol: --reward.remote_url http://HOST:PORT/get_reward."""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from openrlhf_bapo.flags.mistakes import exit_with_one_line
from openrlhf_bapo.math_tasks.answers import response_from_query
from openrlhf_bapo.math_tasks.grader import MathGrader, failure_logs

if TYPE_CHECKING:
    from fastapi import FastAPI

LARGEST_BODY = 64 << 20  # bytes; 500 responses of 32,000 tokens


class _RequestError(Exception):
    """A request that does not follow the protocol; has the HTTP status and one line of text."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def parse_request(body: bytes) -> tuple[list[str], list[str]]:
    """Read responses and gold answers from a request of OpenRLHF's `_fetch_rewards_via_http` (utils/agent.py).

    Raises:
        _RequestError: at the first mistake.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _RequestError("the body is not JSON") from error
    if not isinstance(request, dict):
        raise _RequestError("the body must be a JSON object with the lists query, prompts and labels")
    for name, types in (("query", str), ("prompts", str), ("labels", (str, int, float))):
        values = request.get(name)
        if not isinstance(values, list) or not all(isinstance(value, types) for value in values):
            allowed = "texts" if types is str else "texts or numbers"
            raise _RequestError(f"{name} must be a list of {allowed}")
    lengths = {name: len(request[name]) for name in ("query", "prompts", "labels")}
    if len(set(lengths.values())) > 1:
        raise _RequestError(f"query, prompts and labels must have the same length, not {[*lengths.values()]}")
    if not all(str(label).strip() for label in request["labels"]):
        raise _RequestError("labels must not be empty; OpenRLHF sends empty ones without --data.label_key")
    responses = [response_from_query(*pair) for pair in zip(request["query"], request["prompts"], strict=True)]
    return responses, [str(label) for label in request["labels"]]


def make_app(grader: MathGrader) -> "FastAPI":
    """Make the FastAPI application: POST /get_reward, GET /health."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    app = FastAPI(openapi_url=None)  # also leaves out /docs and /redoc

    async def read_body(request: Request) -> bytes:
        chunks, length = [], 0
        async for chunk in request.stream():  # read to the end: a client that is still sending would not see the answer
            length += len(chunk)
            if length <= LARGEST_BODY:
                chunks.append(chunk)
        if length > LARGEST_BODY:
            raise _RequestError(f"the body has {length} bytes, more than {LARGEST_BODY}: send fewer queries", 413)
        return b"".join(chunks)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        try:
            responses, golds = parse_request(await read_body(request))
        except _RequestError as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        try:
            # In a thread, since a long text or the start of the workers would delay other requests.
            futures = await asyncio.to_thread(lambda: [*map(grader.submit, responses, golds)])
            grades = await asyncio.gather(*map(asyncio.wrap_future, futures))
        except asyncio.CancelledError:
            return JSONResponse({"error": "the server is shutting down"}, status_code=503)
        rewards = [float(grade.is_correct) for grade in grades]
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": failure_logs(grades)})

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "timeouts": grader.timeouts, "crashes": grader.crashes}

    return app


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo serve-math-reward", description=__doc__)
    parser.error = exit_with_one_line
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=5000, help="port to listen on; 0: any free one (default: 5000)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="grading processes (default: one per CPU)")
    parser.add_argument("--time_limit", type=float, default=5.0, help="seconds for one answer (default: 5)")
    args = parser.parse_args(argv)
    if args.workers < 1:
        exit_with_one_line(f"--workers {args.workers}: allowed: 1 or more")
    if not 0 < args.time_limit < float("inf"):
        exit_with_one_line(f"--time_limit {args.time_limit:g}: allowed: a number of seconds above 0")
    try:
        listener = socket.create_server((args.host, args.port), backlog=2048)
    except (OSError, OverflowError) as error:
        exit_with_one_line(f"--host {args.host} --port {args.port}: {error}; allowed: a free port of this machine")

    import uvicorn

    grader = MathGrader(args.workers, args.time_limit)
    config = uvicorn.Config(make_app(grader), log_level="warning", timeout_graceful_shutdown=1)
    # uvicorn shuts down on a signal, then raises it again for the handler that was there before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, port = listener.getsockname()[:2]
    print(f"grading math answers at http://{host}:{port}/get_reward with {args.workers} workers", flush=True)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        grader.close()


if __name__ == "__main__":
    main(sys.argv[1:])
