"""Quickly starts Python processes that import torch, DeepSpeed and vLLM. The imports take most of a short run's time.

A *template* process imports them once. A small client stands for `python`. It sends its arguments, environment and open
files to the template, and a fork of the template continues as that process, in the client's process group. The client
ends with its fork and with the same exit code, and the fork ends if the client does. In the fork, `sys.executable` is
the client, so that Ray and multiprocessing start all further processes of a run in the same way. OpenRLHF and this
package are not in the template: each process imports them itself, in the order of a cold start.

    python warm_start.py FOLDER [MODULES]  runs a template with these modules; its client is FOLDER/python
    python warm_start.py -m MODULE ...     does what `python -m MODULE ...` does, with its own template

With the second form, the processes of a run descend from its command, as in a cold start.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import marshal
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

MODULES = (
    "openrlhf_bapo.openrlhf",  # first, so that its hooks act on the modules below
    "torch",
    "deepspeed",
    "transformers",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""Modules that several processes of a run import, besides OpenRLHF and this package."""

# It imports only what is compiled into Python. json, os, signal, socket and struct take 25 ms, 23 times a run.
_CLIENT = """#!{python} -ISE
import _signal, _socket, marshal, posix, sys

files = []
for number in map(int, posix.listdir("/proc/self/fd")):
    try:
        if posix.get_inheritable(number):
            files.append(number)
    except OSError:
        pass  # the folder's own
blocked = [int(number) for number in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])]
request = dict(argv=sys.argv[1:], environ=posix.environ, cwd=posix.getcwd(), blocked=blocked, files=files)
request = marshal.dumps(request | dict(session=posix.getsid(0), group=posix.getpgrp()))
connection = _socket.socket(_socket.AF_UNIX)
connection.connect({address!r})
numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
size = len(request).to_bytes(4, sys.byteorder)
connection.sendmsg([size], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
connection.sendall(request)
process = int.from_bytes(connection.recv(4), sys.byteorder)
_signal.signal(_signal.SIGTERM, lambda *_: posix.kill(process, _signal.SIGTERM))
_signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # a terminal's Ctrl-C reaches the fork too
answer = connection.recv(4)
code = int.from_bytes(answer, sys.byteorder, signed=True) if answer else 1
if code < 0:
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -code)
posix._exit(code)
"""
_MOST_FILES = 250  # a message over a Unix socket carries 253
_PR_SET_PDEATHSIG = 1


def _import_libraries(names: Sequence[str]) -> None:
    # The template must not import ray, whose library reads the environment of its process when it is loaded.
    sys.modules["ray"] = None
    for name in names:
        importlib.import_module(name)
    del sys.modules["ray"]
    gc.freeze()  # else each fork's collector looks through all of it, and so copies it


def _make_client(folder: Path) -> socket.socket:
    """Return the socket for the clients of this process, and make `sys.executable` a client."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    client = folder / "python.new"
    client.write_text(_CLIENT.format(python=sys._base_executable, address=str(folder / "socket")))
    client.chmod(stat.S_IRWXU)
    sys.executable = str(client.rename(folder / "python"))
    multiprocessing.set_executable(sys.executable)
    return listener


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(listener: socket.socket) -> None:
    """Fork a process for every client. Send the client its exit code, and kill the process if the client ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals to the process group are for the other processes
    poll, waiting = select.poll(), {}  # file of the client or of the process -> (process, file of the process, client)
    poll.register(listener, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if file == listener.fileno():
                client, _ = listener.accept()
                process = os.fork()
                if not process:
                    listener.close()
                    _become(client)
                with contextlib.suppress(OSError):  # a client that was killed meanwhile; its process then ends too
                    client.sendall(struct.pack("i", process))
                ended = os.pidfd_open(process)
                waiting[ended] = waiting[client.fileno()] = process, ended, client
                poll.register(ended, select.POLLIN)
                poll.register(client, select.POLLRDHUP)
            elif file in waiting:  # not if the process's other file was handled in this round
                process, ended, client = waiting[file]
                if file == client.fileno():
                    os.kill(process, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                for number in (ended, client.fileno()):
                    poll.unregister(number)
                    del waiting[number]
                with contextlib.suppress(OSError):  # the client may be gone
                    client.sendall(struct.pack("i", code))
                client.close()
                os.close(ended)


def _become(client: socket.socket) -> NoReturn:
    """Continue as the process that `client` stands for."""
    code = 1
    try:
        message, files, *_ = socket.recv_fds(client, 4, _MOST_FILES)
        (size,) = struct.unpack("i", message)
        request = marshal.loads(client.recv(size, socket.MSG_WAITALL))
        client.close()
        # Moved to high numbers first, so that they do not collide with the requested ones.
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(high, request["files"], strict=True):
            os.dup2(file, number)
            os.close(file)
        _take_over(request)
        _run(request["argv"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_over(request: dict) -> None:
    """Take over the client's environment, folder, session, signals and import path."""
    for name in os.environb.keys() - request["environ"].keys():
        del os.environb[name]
    for name, value in request["environ"].items():
        if os.environb.get(name) != value:  # unchanged ones stay in place, where Ray looks for the process title
            os.environb[name] = value
    os.chdir(request["cwd"])
    if request["session"] != os.getsid(0):
        os.setsid()  # the client leads a session, which another process cannot join
    elif request["group"] != os.getpgrp():
        os.setpgid(0, request["group"])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _use_python_path(os.environ.get("PYTHONPATH", ""))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own random numbers are seeded after a fork
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def _use_python_path(value: str) -> None:
    """Apply PYTHONPATH as Python does when it starts."""
    folders = [folder for folder in value.split(os.pathsep) if folder and folder not in sys.path]
    sys.path[1:1] = folders
    if any(Path(folder, "sitecustomize.py").exists() for folder in folders):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _run(argv: list[str]) -> None:
    """Do in this process what `python` does with these arguments."""
    if ray_utils := sys.modules.get("vllm.v1.executor.ray_utils"):  # the only module of the template that imports ray
        importlib.reload(ray_utils)
    while argv[0] not in ("-c", "-m") and argv[0].startswith("-"):
        argv = argv[2 if argv[0] in ("-X", "-W") else 1 :]
    kind, rest = argv[0], argv[1:]
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy._run_module_as_main(rest[0])
        return
    main = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv, sys.path[0], code = ["-c", *rest[1:]], "", rest[0]
    else:
        sys.argv, sys.path[0], code = argv, str(Path(kind).absolute().parent), Path(kind).read_text()
        main.__file__ = kind
    sys.modules["__main__"] = main
    exec(compile(code, getattr(main, "__file__", "<string>"), "exec"), vars(main))


def _main(argv: list[str]) -> None:
    parent = os.getppid()
    if Path(argv[0]).is_dir():
        _import_libraries(argv[1:] or MODULES)
        _end_with(parent)
        _serve(_make_client(Path(argv[0])))
    _import_libraries(MODULES)
    folder = Path(tempfile.mkdtemp(prefix="warm-start-"))
    parent, listener = os.getpid(), _make_client(folder)
    if not os.fork():
        _end_with(parent)
        _serve(listener)
    listener.close()
    atexit.register(shutil.rmtree, folder)
    _run(argv)


if __name__ == "__main__":
    from warm_start import _main as main  # imported as a module, because a fork replaces __main__

    main(sys.argv[1:])
