"""How a rollout engine asks for rewards: it waits for a server that is away, and ends a call that hangs.

In place of the two ways of OpenRLHF's `SingleTurnAgentExecutor` (utils/agent.py), which tries a server five times in a
row, waits for a reward function for ever, and lets an answer that is no reward pass. A response without a reward gets
None, and the cause among its `extra_logs`.
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
from dataclasses import dataclass
from types import ModuleType

import aiohttp
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bapo.openrlhf.registration import call_what_waits

logger = init_logger(__name__)

FAILED_REWARD = "reward_failure"
"""Among a response's `extra_logs`: "KIND: TEXT", why it has no reward."""

KINDS = (
    *("unreachable", "timeout", "http_status", "exception"),  # no answer
    *("not_json", "missing_key", "wrong_length", "wrong_type", "none", "not_finite"),  # one that is no reward
)

_LONGEST_PAUSE = 30.0  # seconds
_BUSY = (408, 429)  # HTTP: sent again later, as 500 and above

# As many at once as asyncio.to_thread would run, which OpenRLHF uses.
_MOST_THREADS = min(32, (os.cpu_count() or 1) + 4)


class RewardFault(Exception):
    """No reward, for one of `KINDS`; the text names who was asked and what came back."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")


@dataclass
class RewardLimits:
    """`--reward_fault.*`, as far as an engine needs them."""

    patience: float = 600.0
    """Seconds for which a call is tried again while its servers are away."""

    timeout: float = 300.0
    """Seconds for one answer: longer than a busy server takes, and `patience` has room for a second try."""


class Servers:
    """Reward servers, asked in turn; one that is away is left out for a while, longer every time."""

    def __init__(self, urls: list[str]) -> None:
        self._servers = [_Server(url) for url in urls]
        self._turns = itertools.count()

    async def ask(self, data: dict, limits: RewardLimits) -> tuple[str, str]:
        """Post `data` as JSON until a server answers; its address, and the answer's text.

        Raises:
            RewardFault: if all are away for longer than `limits.patience`, or one refuses the request.
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
                server.is_away(began, str(away))
                give_up = min(give_up, time.monotonic() + limits.patience)
                if time.monotonic() >= give_up:
                    raise RewardFault(away.kind, f"{away}, for {limits.patience:g} s") from None
            else:
                server.num_failures = 0
                return server.url, answer

    def _next(self) -> "_Server":
        """The next one in turn that is not left out, or else the first that is to be asked again."""
        turn, now = next(self._turns), time.monotonic()
        in_turn = [self._servers[(turn + i) % len(self._servers)] for i in range(len(self._servers))]
        return min(in_turn, key=lambda server: max(server.away_until, now))


@dataclass
class _Server:
    url: str
    num_failures: int = 0
    """In a row."""
    away_until: float = 0.0
    _failed_at: float = 0.0

    def is_away(self, began: float, how: str) -> None:
        """A call that began then has failed; those under way at once count as one."""
        if began < self._failed_at:
            return
        self._failed_at = time.monotonic()
        pause = min(0.5 * 2**self.num_failures, _LONGEST_PAUSE)
        self.num_failures += 1
        self.away_until = self._failed_at + pause
        logger.warning(f"reward server away: {how}; asked again in {pause:g} s")


class _Away(Exception):
    """A server that may be there later."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


async def _post(url: str, data: dict, timeout: float) -> str:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(url, json=data) as response,
        ):
            answer = await response.text(errors="replace")
    except TimeoutError:
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
    """Calls a reward function in threads, which are left alone when their time is over."""

    def __init__(self) -> None:
        # As asyncio.to_thread's pool, one for each event loop; an engine has one.
        self._places = weakref.WeakKeyDictionary()

    async def call(self, function, args: tuple, timeout: float, where: str):
        """What `function(*args)` returns.

        Raises:
            RewardFault: after `timeout` seconds; Python code is ended there, code of another language goes on alone.
        """
        async with self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MOST_THREADS)):
            future = concurrent.futures.Future()
            # A pool's threads would be waited for when the process ends.
            thread = threading.Thread(target=_run, args=(future, function, args), daemon=True)
            thread.start()
            returned = asyncio.wrap_future(future)
            await asyncio.wait([returned], timeout=timeout)
            if not returned.done():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
                returned.cancel()
                raise RewardFault("timeout", f"{where}: reward_func has not returned within {timeout:g} s")
            return future.result()  # asyncio's makes TimeoutErrors anew, without their places


def _run(future: concurrent.futures.Future, function, args: tuple) -> None:
    future.set_running_or_notify_cancel()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # SystemExit would end the engine's loop
        future.set_exception(RuntimeError(repr(error)))


def read_rewards(answer: object, num_responses: int, where: str) -> dict:
    """An answer's rewards, scores (the rewards, where it has none) and `extra_logs`, each a list of numbers.

    Raises:
        RewardFault: if it has not one finite reward and score for each response.
    """
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise RewardFault("missing_key", f"{where}: the answer is {_shown(answer)}, no dict with 'rewards'")
    found = {"rewards": _numbers(answer["rewards"], num_responses, f"{where}: 'rewards'")}
    found["scores"] = found["rewards"]
    if answer.get("scores") is not None:
        found["scores"] = _numbers(answer["scores"], num_responses, f"{where}: 'scores'")
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise RewardFault("wrong_type", f"{where}: 'extra_logs' is {_shown(logs)}, no dict")
    found["extra_logs"] = {
        name: _numbers(value, num_responses, f"{where}: {name!r} of 'extra_logs'", finite=False)
        for name, value in logs.items()
    }
    return found


def read_number(value: object, what: str) -> float:
    """The one finite number that a value is, or a list or tensor of one has; RewardFault for anything else."""
    return _numbers(value, 1, what)[0]


def _numbers(values: object, count: int, what: str, finite: bool = True) -> list[float]:
    if values is None:
        raise RewardFault("none", f"{what} is None")
    if hasattr(values, "tolist"):  # a tensor, an array
        values = values.flatten().tolist()
    if not isinstance(values, list | tuple):
        values = [values]
    if len(values) != count:
        raise RewardFault("wrong_length", f"{what} has {len(values)} values for {count} responses")
    values = [value.item() if hasattr(value, "item") else value for value in values]
    for value in values:
        if value is None:
            raise RewardFault("none", f"{what} is None")
        if not isinstance(value, int | float):
            raise RewardFault("wrong_type", f"{what} is {_shown(value)}, no number")
        if finite and not math.isfinite(value):
            raise RewardFault("not_finite", f"{what} is {value}")
    return values


def _shown(answer: object) -> str:
    return repr(" ".join(str(answer).split())[:80])


def use_reward_calls(agent: ModuleType) -> None:
    """Put ours into OpenRLHF's `SingleTurnAgentExecutor`; an engine sets `reward_limits`."""
    executor = agent.SingleTurnAgentExecutor
    executor.reward_limits = RewardLimits()
    executor._fetch_rewards_via_func = _fetch_rewards_via_func
    executor._fetch_rewards_via_http = _fetch_rewards_via_http


async def _fetch_rewards_via_func(self, queries: list[str], prompts: list[str], labels: list) -> list[dict]:
    """As upstream's: an answer a response."""
    if not hasattr(self, "_caller"):
        self._caller = Caller()
    where, timeout = self.reward_endpoints[0], self.reward_limits.timeout

    async def ask(*one) -> dict:
        answer = await self._caller.call(self.reward_func, tuple([value] for value in one), timeout, where)
        return read_rewards(answer, 1, where)

    return await asyncio.gather(*(_or_cause(ask(*one), 1) for one in zip(queries, prompts, labels, strict=True)))


async def _fetch_rewards_via_http(self, queries: list[str], prompts: list[str], labels: list) -> list[dict]:
    """As upstream's: an answer for the responses that a server is given, which are one where an engine asks."""
    if not hasattr(self, "_servers"):
        self._servers = Servers(self.reward_endpoints)

    async def ask(start: int) -> dict:
        parts = [values[start : start + size] for values in (queries, prompts, labels)]
        data = dict(zip(("query", "prompts", "labels"), parts, strict=True))
        url, answer = await self._servers.ask(data, self.reward_limits)
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            raise RewardFault("not_json", f"{url}: the answer is not JSON: {_shown(answer)}") from None
        return read_rewards(answer, len(parts[0]), url)

    size = math.ceil(len(queries) / len(self.reward_endpoints))
    starts = range(0, len(queries), size)
    return await asyncio.gather(*(_or_cause(ask(start), len(queries[start : start + size])) for start in starts))


async def _or_cause(asking, num_responses: int) -> dict:
    try:
        return await asking
    except RewardFault as fault:
        cause = str(fault)
    except Exception as error:  # of the reward function
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())[:300]
        cause = f"exception: {type(error).__name__}: {said} ({place.filename}, line {place.lineno})"
    return {"rewards": None, "extra_logs": {FAILED_REWARD: cause}}


call_what_waits(__name__)
