"""Starts programs without the seconds that importing torch takes, as forks of a template.

The template is an interpreter that has imported torch. A program runs as in a new interpreter,
``python PATH ARGUMENTS`` or ``python -c SOURCE``: its module is ``__main__``, it has its own
arguments, environment, directory and session, and shmloader is not imported. But the environment
that an interpreter reads at its start, and torch at its import, is that of the template.
"""

import array
import contextlib
import functools
import gc
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# The longest request, which is one message.
_MOST_BYTES = 1 << 18


def environment_of_programs() -> dict[str, str]:
    """Return the variables of programs: they import this checkout, and dump no stacks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONFAULTHANDLER", None)
    return environment


class Forked:
    """A program that runs, or has ended.

    Attributes:
        pid: The pid of its process, which leads a session of its own.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._code: int | None = None
        self.pid = int(channel.recv(100) or b"0")
        if self.pid == 0:
            raise RuntimeError("the template has ended")

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, negative for a signal; None if it has not ended in time."""
        if self._code is None:
            ready, _, _ = select.select([self._channel], [], [], timeout_s)
            if not ready:
                return None
            self._code = os.waitstatus_to_exitcode(int(self._channel.recv(100)))
            self._channel.close()
        return self._code


class Template:
    """Forks programs from an interpreter, which imports torch when it gets the first request.

    Args:
        environment: Variables of the template, beside those of this process.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment_of_programs() | (environment or {}),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        directory: Path,
        files: tuple[int, int, int],
    ) -> Forked:
        """Start a program.

        Args:
            arguments: Arguments of ``python``: a path and its arguments, or ``-c`` and a text.
            environment: All variables of its environment.
            directory: Its working directory.
            files: Descriptors of its standard input, output and error.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = {
                "arguments": list(arguments),
                "environment": dict(environment),
                "directory": str(directory),
            }
            rights = array.array("i", [*files, theirs.fileno()])
            self._control.sendmsg(
                [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            )
        return Forked(ours)

    def close(self) -> None:
        """End the template. Programs that run continue."""
        self._control.close()
        self._process.wait()


@functools.cache
def shared_template() -> Template:
    """Return the template of this test process, which ends with the process."""
    return Template()


# In the template's process ----------------------------------------------------------------------


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork a program for each request. It sends its pid; its wait status is sent when it ends.

    Returns:
        In a program: the request. In the template, at its end: None.
    """
    channels: dict[int, socket.socket] = {}  # by process
    pidfds: dict[int, int] = {}  # processes by descriptor
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in pidfds:
                poll.unregister(fd)
                os.close(fd)
                _, status = os.waitpid(pid := pidfds.pop(fd), 0)
                with channels.pop(pid) as channel:
                    _tell(channel, status)
                continue
            data, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, 4)
            if not data:
                return None
            import torch  # noqa: F401

            gc.freeze()  # a program ends sooner
            pid = os.fork()
            if pid == 0:
                for other in [control, *channels.values()]:
                    other.close()
                for other_fd in pidfds:
                    os.close(other_fd)
                os.setsid()
                _tell(socket.socket(fileno=os.dup(fds[3])), os.getpid())
                for number, file in enumerate(fds[:3]):
                    os.dup2(file, number)
                for file in fds:
                    os.close(file)
                request: dict[str, Any] = json.loads(data)
                return request
            for file in fds[:3]:
                os.close(file)
            channels[pid] = socket.socket(fileno=fds[3])
            pidfds[os.pidfd_open(pid)] = pid
            poll.register(next(reversed(pidfds)), select.POLLIN)


def _tell(channel: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # if the test has closed its end
        channel.send(str(number).encode())


def _become(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make this process the program of a request.

    Returns:
        The program's code, and the namespace of its module.
    """
    import random

    import numpy as np

    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr] # it is a pipe now
    random.seed()
    np.random.seed()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    arguments = request["arguments"]
    module = vars(sys.modules["__main__"])
    kept = {"__name__", "__builtins__", "__loader__", "__spec__", "__package__"}
    if arguments[0] == "-c":
        text, name = arguments.pop(1), "<string>"
        sys.path[0] = ""
    else:
        name = arguments[0]
        text = Path(name).read_text()
        sys.path[0] = str(Path(name).parent)
    sys.argv[:] = arguments
    code = compile(text, name, "exec", dont_inherit=True)
    for old in set(module) - kept:
        del module[old]
    if name != "<string>":
        module["__file__"] = name
    return code, module


if __name__ == "__main__" and (_request := _serve(socket.socket(fileno=int(sys.argv[1])))):
    exec(*_become(_request))
