"""The command's threads that ask Ray have ended when Ray is shut down."""

import threading
import time
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from patience import PATIENCE
from test_failures import ARGS

from openrlhf_bapo.cli import train_ppo_ray
from openrlhf_bapo.run import cluster, interrupts, threads
from openrlhf_bapo.run.threads import end_threads, is_ending, start_thread


def end_of_a_run() -> None:
    with pytest.raises(SystemExit):
        train_ppo_ray._end(ValueError("the cause"), ARGS, [])


def end_of_a_complete_run() -> None:
    train_ppo_ray.main([])
    ray.shutdown()  # as Ray itself does at the end of the process


@pytest.mark.parametrize("end", [end_of_a_run, end_of_a_complete_run])
def test_threads_have_ended_when_ray_is_shut_down(end, monkeypatch):
    ended, seen = threading.Event(), []

    def ask() -> None:
        while not is_ending(0.01):
            pass
        time.sleep(0.1)
        ended.set()

    monkeypatch.setattr(train_ppo_ray, "leave_signals", lambda: None)  # pytest keeps its own
    monkeypatch.setattr(train_ppo_ray.signal, "signal", lambda *_: None)
    for name in ("watch_engines", "warn_of_small_disks", "use_checkpoint", "_prepare_ray"):
        monkeypatch.setattr(train_ppo_ray, name, lambda *_: None)
    monkeypatch.setattr(train_ppo_ray, "run_upstream", lambda argv, prepare, start: prepare(Namespace(**ARGS)))
    monkeypatch.setattr(train_ppo_ray, "describe_training", lambda _: "")  # nothing has run
    monkeypatch.setattr(ray, "shutdown", lambda: seen.append(ended.is_set()))
    monkeypatch.setattr(train_ppo_ray, "end_threads", partial(end_threads, PATIENCE))
    start_thread(ask)
    end()
    assert seen == [True]


def starting_engines(monkeypatch) -> None:
    engine = SimpleNamespace(check_health=SimpleNamespace(remote=lambda: "an answer that never comes"))
    parts = SimpleNamespace(create_vllm_engines=lambda: [engine])
    monkeypatch.setattr(interrupts.wrapt, "register_post_import_hook", lambda use, _: use(parts))
    interrupts.watch_engines([], [])
    parts.create_vllm_engines()


def waiting_for_gpus(_) -> None:
    start_thread(cluster._report_waiting, {})


@pytest.mark.parametrize("wait", [starting_engines, waiting_for_gpus])
def test_a_thread_that_waits_for_the_cluster_ends_when_asked(wait, monkeypatch):
    asked = threading.Event()

    def nothing(*_, **__):
        asked.set()
        return {}

    monkeypatch.setattr(cluster, "is_training", lambda: False)
    monkeypatch.setattr(cluster, "_without_resources", nothing)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (nothing(), refs))
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    wait(monkeypatch)
    (thread,) = threads._threads
    assert asked.wait()
    end_threads(PATIENCE)
    assert not thread.is_alive()


def test_a_thread_that_does_not_end_in_time_is_still_told_to_end():
    may_go_on, told = threading.Event(), []

    def ask() -> None:
        may_go_on.wait()
        told.append(is_ending())

    start_thread(ask)
    (thread,) = threads._threads
    end_threads(0.01)
    may_go_on.set()
    thread.join()
    end_threads()
    assert told == [True] and not is_ending()
