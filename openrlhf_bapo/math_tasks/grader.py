"""Grades responses in worker processes with limits on time and memory.

    submit --> plain comparison in the calling thread --> first attempts --> second attempts --> Grade

Each worker has a thread that sends it one answer at a time and waits for the outcome. A worker imports math-verify once
and forks a child that compares. The kernel's timer ends the child even inside a C call that does not return, such as a
power of big integers. The next child is forked at once.

An ordinary answer does not wait for all hostile answers before it. The first attempt at an answer gets a fifth of the
time limit, which is enough for nearly all answers. An unfinished one starts again with the whole limit when no first
attempt is waiting. For example, with one worker and four hostile answers in front, an ordinary answer waits for four
fifths of the limit, or for one limit if a second attempt is running, instead of four limits.
"""

import ctypes
import itertools
import json
import logging
import mmap
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from typing import NoReturn, TextIO

from openrlhf_bapo.math_tasks.answers import Answer, find_answer, find_gold, is_equal, is_plainly_equal

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grade:
    """The grade of one response."""

    is_correct: bool
    failure: str | None = None
    """Why the answer could not be compared, and so counts as wrong: "timeout" or "crash"; None if it was compared."""


def failure_logs(grades: Sequence[Grade]) -> dict[str, list[float]]:
    """Return OpenRLHF's extra_logs: "graded_timeouts" and "graded_crashes", 1.0 for each such grade, else 0.0."""
    failures = {"graded_timeouts": "timeout", "graded_crashes": "crash"}
    return {name: [float(grade.failure == failure) for grade in grades] for name, failure in failures.items()}


@dataclass
class _Task:
    answer: Answer
    gold: str
    grade: "Future[Grade]"


class MathGrader:
    """Grades like `is_correct`, from any thread, with limits on time and memory per answer.

    The plain comparison in the calling thread decides most answers. The others go to worker processes, which start when
    they are needed and end with this process, even if it is killed.

    Args:
        num_workers: maximum number of worker processes.
        time_limit: seconds per answer, not counting the wait for a free worker.
        memory_limit: bytes that a worker may allocate after its imports, on platforms that support such a limit.
    """

    def __init__(self, num_workers: int, time_limit: float, memory_limit: int = 2 << 30):
        self.num_workers, self.time_limit, self.memory_limit = num_workers, time_limit, memory_limit
        self.timeouts = 0
        """Number of answers so far that exceeded the time limit; each counts as wrong."""
        self.crashes = 0
        """Number of answers so far that ended their worker or exhausted its memory; each counts as wrong."""
        self._lock = threading.Lock()  # guards the attributes below, and the counts
        self._tasks: queue.PriorityQueue[tuple[int, int, _Task | None]] = queue.PriorityQueue()  # attempt, number, task
        self._threads: list[threading.Thread] = []
        self._workers: set[subprocess.Popen] = set()

    def grade(self, responses: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """Grade each response against its gold answer; return when all are graded."""
        return [future.result() for future in [self.submit(*pair) for pair in zip(responses, golds, strict=True)]]

    def submit(self, response: str, gold: str) -> "Future[Grade]":
        """Grade one response without waiting. The future cannot be canceled.

        It holds a RuntimeError if workers cannot compare at all, for example because math-verify is not installed.
        """
        answer, gold = find_answer(response), find_gold(gold)
        plainly = is_plainly_equal(answer, gold)
        grade: Future[Grade] = Future()
        grade.set_running_or_notify_cancel()
        if plainly is not None:
            grade.set_result(Grade(plainly))
            return grade
        assert answer is not None  # for None, is_plainly_equal returns False
        with self._lock:
            self._tasks.put((1, next(_numbers), _Task(answer, gold, grade)))
            if len(self._threads) < self.num_workers:
                self._threads.append(threading.Thread(target=self._work, args=[self._tasks], daemon=True))
                self._threads[-1].start()
        return grade

    def close(self) -> None:
        """End the workers; answers in progress count as crashed. A later call starts new workers."""
        with self._lock:
            tasks, self._tasks = self._tasks, queue.PriorityQueue()
            threads, self._threads = self._threads, []
            for worker in self._workers:
                worker.kill()
        for _ in threads:
            tasks.put((3, next(_numbers), None))
        for thread in threads:
            thread.join()

    def _work(self, tasks: queue.PriorityQueue) -> None:
        # A thread runs this until close() puts None. It owns one worker and replaces it when it has ended.
        worker = None
        while True:
            attempt, _, task = tasks.get()
            if task is None or worker is None or worker.poll() is not None:
                worker = self._replace(worker, tasks)
            if task is None:
                return
            outcome = worker and _ask(worker, task, self.time_limit / 5 if attempt == 1 else self.time_limit)
            with self._lock:
                if outcome == "timeout" and attempt == 1 and tasks is self._tasks:
                    tasks.put((2, next(_numbers), task))
                    continue
            # A worker ends by itself, and not by a signal, only if it cannot compare at all.
            if outcome is None and worker is not None and (code := worker.wait()) > 0:
                task.grade.set_exception(RuntimeError(f"the math grader's worker ends with {code}; its error is above"))
                continue
            self._finish(task, outcome or "crash")

    def _replace(self, ended: subprocess.Popen | None, tasks: queue.PriorityQueue) -> subprocess.Popen | None:
        if ended is not None:
            ended.kill()
            ended.communicate()
        with self._lock:
            self._workers.discard(ended)
            if tasks is not self._tasks:  # closed
                return None
            # A separate program: a fork would copy the locks of other threads, and multiprocessing's start methods run
            # the main module again, which may be Ray's or a user's script without `if __name__ == "__main__"`.
            worker = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(self.memory_limit)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._workers.add(worker)
            return worker

    def _finish(self, task: _Task, outcome: str) -> None:
        if outcome in ("equal", "different"):
            task.grade.set_result(Grade(outcome == "equal"))
            return
        with self._lock:
            self.timeouts += outcome == "timeout"
            self.crashes += outcome == "crash"
            num_failures = self.timeouts + self.crashes
        if num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
            _logger.warning(
                "%d answers exceeded the time limit of %g s and %d ended their worker; they count as wrong",
                *(self.timeouts, self.time_limit, self.crashes),
            )
        task.grade.set_result(Grade(False, outcome))


_numbers = itertools.count(1)


def _ask(worker: subprocess.Popen, task: _Task, seconds: float) -> str | None:
    # Returns "equal", "different", "timeout" or "crash"; None if the worker has ended.
    number = next(_numbers)
    try:
        print(json.dumps([number, seconds, *astuple(task.answer), task.gold]), file=worker.stdin, flush=True)
    except BrokenPipeError:
        return None
    assert worker.stdout is not None  # a pipe
    for line in worker.stdout:
        answered, outcome = line.split()
        if int(answered) == number:
            return outcome
    return None


# In a worker ---------------------------------------------------------------------------------------------------------

_TASKS_OF_A_CHILD = 1000  # then a new child replaces it, which frees the memory that its tasks have left
_PIPE_ENDED = 3


def _serve(grader: int, memory_limit: int) -> None:
    """Answer tasks from stdin on stdout until the grader's process closes the pipe or ends.

    A child compares. When it dies, the next one is forked at once, with math-verify already imported.
    """
    _end_with(grader)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the grader's process handles Ctrl-C and ends this one
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for answer, gold in ((r"\frac{1}{\sqrt{2}}+x^2", r"\frac{\sqrt{2}}{2}+x"), (r"\{1\}", "(0,1]"), ("x>1", "(a,b)")):
        is_equal(Answer(answer, f"\\boxed{{{answer}}}"), gold)  # imports and fills caches while no time limit runs
    if not is_equal(Answer(r"\frac{1}{2}+x", r"\boxed{\frac{1}{2}+x}"), r"x+\frac{2}{4}"):
        sys.exit("openrlhf-bapo: math-verify cannot parse formulas; is its parser (latex2sympy2_extended) whole?")
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    worker = os.getpid()
    at_work = memoryview(mmap.mmap(-1, 8)).cast("Q")  # the number of the child's current task; 0: none
    while True:
        child = os.fork()
        if child == 0:
            _end_with(worker)
            _compare(outcomes, at_work)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if exit_code == _PIPE_ENDED:
            return
        if at_work[0]:
            print(at_work[0], "timeout" if exit_code == -signal.SIGALRM else "crash", file=outcomes, flush=True)
            at_work[0] = 0


def _compare(outcomes: TextIO, at_work: memoryview) -> NoReturn:
    code = 1
    try:
        for _ in range(_TASKS_OF_A_CHILD):
            line = sys.stdin.readline()
            if not line:
                code = _PIPE_ENDED
                break
            at_work[0], seconds, text, passage, gold = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # the kernel ends this process, even in a C call
            outcome = "equal" if is_equal(Answer(text, passage), gold) else "different"
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(at_work[0], outcome, file=outcomes, flush=True)
            at_work[0] = 0
    finally:
        os._exit(code)


def _end_with(parent: int) -> None:
    # On other systems than Linux a closed pipe ends a worker, and the timer ends its child.
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
