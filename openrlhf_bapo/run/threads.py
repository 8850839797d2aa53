"""Threads of the command that ask Ray. They end before Ray is shut down.

A call to Ray after `ray.shutdown` ends the process without a message, or starts another cluster.
"""

import threading
from collections.abc import Callable
from typing import Any

_ending = threading.Event()
_threads: list[threading.Thread] = []


def start_thread(work: Callable[..., None], *args: Any) -> None:
    """Run `work` in a thread. If it takes long, it must end when `is_ending` returns True."""
    _threads.append(threading.Thread(target=work, args=args, daemon=True))
    _threads[-1].start()


def is_ending(seconds: float = 0.0) -> bool:
    """Wait for this long or until the threads must end; return whether they must."""
    return _ending.wait(seconds)


def end_threads(patience: float = 10.0) -> None:
    """Let the threads end, and wait for each for up to `patience` seconds."""
    _ending.set()
    for thread in _threads:
        thread.join(patience)
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    if not _threads:
        _ending.clear()
