"""Reward calls of a rollout engine: they wait for a server that is away, and end a reward function that hangs.

They replace both kinds of calls in OpenRLHF's `SingleTurnAgentExecutor` (utils/agent.py). OpenRLHF's calls try a server
five times in a row, wait for a reward function without a limit, and accept invalid answers. Here, a response without a
valid reward gets the reward None, and the cause in its `extra_logs`.
"""

import asyncio
import concurrent.futures
import ctypes
import itertools
import json
import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import aiohttp
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)

FAILED_REWARD = "reward_failure"
"""Key in the `extra_logs` of a response without a reward; OpenRLHF has no other field for the cause. The value is the
`RewardFault` as text, for example "timeout: reward.py: reward_func has not returned within 300 s". Saved unfinished
responses have this key too."""

KINDS = (
    *("unreachable", "timeout", "http_status", "exception"),  # no answer
    *("not_json", "missing_key", "wrong_length", "wrong_type", "none", "not_finite"),  # an invalid answer
)
"""Kinds of `RewardFault`, and names of metrics under "reward_fault/"."""

_LONGEST_PAUSE = 30.0  # seconds
_BUSY = (408, 429)  # HTTP statuses after which a request is sent again, like 500 and above

# As many threads as asyncio.to_thread would use, which OpenRLHF's calls use.
_MOST_THREADS = min(32, (os.cpu_count() or 1) + 4)


class RewardFault(Exception):
    """A response has no valid reward.

    Args:
        kind: one of `KINDS`.
        text: which server or function was asked, and what it answered.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    @classmethod
    def parse(cls, fault: str) -> "RewardFault":
        """Return the fault whose text form is `fault`."""
        return cls(*fault.split(": ", 1))


@dataclass
class RewardLimits:
    """The `--reward_fault.*` settings that an engine needs."""

    patience: float = 600.0
    """Seconds for which a call is repeated while its servers are away."""

    timeout: float = 300.0
    """Seconds to wait for one answer. The default is longer than a busy server takes, and leaves time for a second
    try within the default `patience`."""


class Servers:
    """Reward servers, asked in turn. A server that is away is skipped for a while, longer after each failure."""

    def __init__(self, urls: list[str]) -> None:
        self._servers = [_Server(url) for url in urls]
        self._turns = itertools.count()

    async def ask(self, data: dict, limits: RewardLimits) -> tuple[str, str]:
        """Post `data` as JSON until a server answers.

        Returns:
            The server's address, and the text of its answer.

        Raises:
            RewardFault: if all servers are away for longer than `limits.patience`, or if one refuses the request.
        """
        give_up = math.inf
        while True:
            server = self._next()
            now = time.monotonic()
            if server.away_until > now:
                give_up = min(give_up, now + limits.patience)
                await asyncio.sleep(min(server.away_until, give_up) - now)
            began = time.monotonic()
            try:
                answer = await _post(server.url, data, limits.timeout)
            except _Away as away:
                server.is_away(began, away.text)
                give_up = min(give_up, time.monotonic() + limits.patience)
                if time.monotonic() >= give_up:
                    raise RewardFault(away.kind, f"{away.text}; tried for {limits.patience:g} s") from None
            else:
                server.num_failures = 0
                return server.url, answer

    def _next(self) -> "_Server":
        """Return the next server in turn that is not skipped, or else the first one that may be asked again."""
        turn, now = next(self._turns), time.monotonic()
        in_turn = [self._servers[(turn + i) % len(self._servers)] for i in range(len(self._servers))]
        return min(in_turn, key=lambda server: max(server.away_until, now))


@dataclass
class _Server:
    url: str
    num_failures: int = 0
    """Failures in a row."""
    away_until: float = 0.0
    """The server is skipped until then; by time.monotonic()."""
    _failed_at: float = 0.0

    def is_away(self, began: float, how: str) -> None:
        """Note that a call failed that began at `began`. Failures of concurrent calls count as one."""
        if began < self._failed_at:
            return
        self._failed_at = time.monotonic()
        pause = min(0.5 * 2**self.num_failures, _LONGEST_PAUSE)
        self.num_failures += 1
        self.away_until = self._failed_at + pause
        logger.warning(f"reward server away: {how}; next request in {pause:g} s")


class _Away(RewardFault):
    """A server does not answer now, but may answer later."""


async def _post(url: str, data: dict, timeout: float) -> str:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(url, json=data) as response,
        ):
            answer = await response.text(errors="replace")
    except asyncio.TimeoutError:  # before Python 3.11 it is not the builtin one
        raise _Away("timeout", f"{url} gives no answer within {timeout:g} s") from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise _Away("unreachable", f"{url} does not answer ({type(error).__name__}: {error})") from None
    if response.status >= 400:
        text = f"{url} answers with HTTP {response.status}: {_shown(answer)}"
        if response.status >= 500 or response.status in _BUSY:
            raise _Away("http_status", text)
        raise RewardFault("http_status", text)
    return answer


class Caller:
    """Calls a reward function in threads. It does not wait for a thread that exceeds the time limit."""

    def __init__(self) -> None:
        # One semaphore for each event loop, like asyncio.to_thread's pool. An engine has one event loop.
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._semaphores = weakref.WeakKeyDictionary()

    async def call(self, function: Callable, args: tuple, timeout: float, where: str) -> Any:
        """Return `function(*args)`.

        Raises:
            RewardFault: after `timeout` seconds. Python code is then stopped. Native code cannot be stopped.
        """
        async with self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MOST_THREADS)):
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            # No thread pool, because the process would wait for its threads when it ends.
            thread = threading.Thread(target=_run, args=(future, function, args), daemon=True)
            thread.start()
            returned = asyncio.wrap_future(future)
            await asyncio.wait([returned], timeout=timeout)
            if not returned.done():
                ident = ctypes.c_ulong(thread.ident)  # type: ignore[arg-type]  # not None after start()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
                returned.cancel()
                raise RewardFault("timeout", f"{where}: reward_func has not returned within {timeout:g} s")
            return future.result()  # `returned` would replace TimeoutErrors, and lose their tracebacks


def _run(future: concurrent.futures.Future, function: Callable, args: tuple) -> None:
    future.set_running_or_notify_cancel()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # SystemExit would end the engine's event loop
        future.set_exception(RuntimeError(repr(error)))


def read_rewards(answer: object, where: str) -> dict:
    """Return the reward, score and `extra_logs` of an answer about one response, each as a list of one number.

    The score defaults to the reward.

    Raises:
        RewardFault: if the answer does not have one finite reward and score.
    """
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise RewardFault("missing_key", f"{where}: the answer is {_shown(answer)}, not a dict with 'rewards'")
    found: dict[str, Any] = {"rewards": [read_number(answer["rewards"], f"{where}: 'rewards'")]}
    found["scores"] = found["rewards"]
    if answer.get("scores") is not None:
        found["scores"] = [read_number(answer["scores"], f"{where}: 'scores'")]
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise RewardFault("wrong_type", f"{where}: 'extra_logs' is {_shown(logs)}, not a dict")
    found["extra_logs"] = {
        name: [read_number(value, f"{where}: {name!r} of 'extra_logs'", finite=False)] for name, value in logs.items()
    }
    return found


def read_number(values: Any, what: str, finite: bool = True) -> float:
    """Return the finite number in `values`, which may also be a list or tensor of one; else raise RewardFault.

    It is a float, because OpenRLHF's evaluation takes means of rewards, which torch does not do with integers.
    """
    if hasattr(values, "tolist"):  # a tensor, an array
        values = values.flatten().tolist()
    if not isinstance(values, list | tuple):
        values = [values]
    if len(values) != 1:
        raise RewardFault("wrong_length", f"{what} has {len(values)} values for one response")
    value = values[0].item() if hasattr(values[0], "item") else values[0]
    if value is None:
        raise RewardFault("none", f"{what} is None")
    if not isinstance(value, int | float):
        raise RewardFault("wrong_type", f"{what} is {_shown(value)}, not a number")
    if finite and not math.isfinite(value):
        raise RewardFault("not_finite", f"{what} is {value}")
    return float(value)


def _shown(answer: object) -> str:
    return repr(" ".join(str(answer).split())[:80])


def use_reward_calls(agent: ModuleType) -> None:
    """Put our calls into OpenRLHF's `SingleTurnAgentExecutor`. An engine sets its `reward_limits`."""
    executor = agent.SingleTurnAgentExecutor
    executor.reward_limits = RewardLimits()
    executor._fetch_rewards_via_func = _fetch_rewards_via_func
    executor._fetch_rewards_via_http = _fetch_rewards_via_http


async def _fetch_rewards_via_func(self: Any, queries: list[str], prompts: list[str], labels: list) -> list[dict]:
    """Ask the reward function about a response, as upstream does. An engine's lists have one entry, like the result."""
    if not hasattr(self, "_caller"):
        self._caller = Caller()
    where, timeout = self.reward_endpoints[0], self.reward_limits.timeout

    async def ask() -> dict:
        answer = await self._caller.call(self.reward_func, (queries, prompts, labels), timeout, where)
        return read_rewards(answer, where)

    return [await _or_fault(ask())]


async def _fetch_rewards_via_http(self: Any, queries: list[str], prompts: list[str], labels: list) -> list[dict]:
    """Ask the servers about a response, as `_fetch_rewards_via_func` asks the function."""
    if not hasattr(self, "_servers"):
        self._servers = Servers(self.reward_endpoints)

    async def ask() -> dict:
        data = {"query": queries, "prompts": prompts, "labels": labels}
        url, answer = await self._servers.ask(data, self.reward_limits)
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            raise RewardFault("not_json", f"{url}: the answer is not JSON: {_shown(answer)}") from None
        return read_rewards(answer, url)

    return [await _or_fault(ask())]


async def _or_fault(asking: Awaitable[dict]) -> dict:
    """Return the answer, or an answer without rewards that has the fault in its `extra_logs`."""
    try:
        return await asking
    except RewardFault as error:
        fault = error
    except Exception as error:  # of the reward function
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())[:300]
        text = f"{type(error).__name__}: {message} ({place.filename}, line {place.lineno})"
        fault = RewardFault("exception", text)
    return {"rewards": None, "extra_logs": {FAILED_REWARD: str(fault)}}
