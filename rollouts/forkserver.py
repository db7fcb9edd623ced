"""The process that starts agents, and the only parent they have. Plain stdlib, run by path.

    python forkserver.py CONTROL_FD < options

It reads one JSON object of options from stdin, imports what the agent's file will import, and then
answers messages on a SOCK_SEQPACKET socket, one JSON object each:

    runner → server   {"run": id, "argv": [...], "env": {...}, "cwd": "..."} with two descriptors
                      (stdout, stderr of the agent), {"kill": id}
    server → runner   {"ready": true, "preloaded": [...], "failed": {...}, "threads": n},
                      {"started": id, "pid": n}, {"refused": id, "error": "..."},
                      {"exited": id, "code": n}  (negative: the signal that ended it)

An agent is a child in a session of its own. With `options["file"]` it is a fork of this process,
which runs the file as `__main__`; without, it executes `argv`. When an agent has ended, by itself
or killed, everything it started is killed too: its process group, and, as this process is their
subreaper, also what left that group. Such orphans are told apart by a mark that is inherited over
fork and exec and has no effect: the soft RLIMIT_RTTIME, a number of microseconds (31 years and
more) that each agent has for itself. When the control socket closes (the runner is gone, however it went)
all agents are killed and the process ends. It has one thread, or forking would not be safe.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rollouts.program import Program

MESSAGE_BYTES_MAX = 128 * 1024
KILL_ROUNDS_MAX = 100
MARK_FIRST = 10**15
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
EXEC_FAILED = 127


def main(control: socket.socket) -> None:
    """Read the options, preload, serve until the runner closes the socket, kill what is left."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.pop(0)  # here, whose modules are not the agent's
    options: dict[str, Any] = json.load(sys.stdin)
    file: str | None = options["file"]
    environ = dict(os.environ)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    report: dict[str, Any] = {"preloaded": [], "failed": {}}
    if file is not None:
        sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
        preloader = _neighbour(here, "preload")
        report = preloader.preload(file, prepare_tls=options["prepare_tls"])
    server = Server(control, _neighbour(here, "program"), file=file, environ=environ)
    gc.collect()
    gc.freeze()  # what is here now is never collected in a child, so its pages stay shared
    server.send({"ready": True, "threads": _threads(), **report})
    try:
        server.serve()
    finally:
        server.kill_all()
        if options["directory"] is not None:
            shutil.rmtree(options["directory"], ignore_errors=True)


class Server:
    """Agents by process id, and the loop that starts, reaps and kills them."""

    def __init__(
        self, control: socket.socket, programs: Any, *, file: str | None, environ: dict[str, str]
    ) -> None:
        self._control = control
        self._programs = programs  # the module `rollouts.program`
        self._file = file
        self._environ = environ  # as it was before anything was imported
        self._program: Program | None = None
        self._agents: dict[int, tuple[str, int]] = {}  # pid -> id, mark
        self._mark = MARK_FIRST
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)

    def send(self, message: dict[str, Any]) -> None:
        """One message to the runner; a runner that is gone is noticed by `serve`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(json.dumps(message).encode())

    def serve(self) -> None:
        """Until the control socket closes or SIGTERM arrives."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, _terminate)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wakeup in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                    self._reap()
                if self._control in ready and not self._answer():
                    return

    def _answer(self) -> bool:
        """Do what one message asks; False when the runner is gone."""
        try:
            body, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, 2)
        except ConnectionResetError:
            return False
        if not body:
            return False
        try:
            message = json.loads(body)
            if "run" in message:
                self._run(message, fds)
            else:
                self._kill(message["kill"])
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _run(self, message: dict[str, Any], fds: list[int]) -> None:
        if self._file is not None:
            self._program = self._programs.Program.read(self._file, self._program)
        # The pipe closes at exec; what is written before says why exec or chdir failed.
        trouble, trouble_writer = os.pipe2(os.O_CLOEXEC)
        self._mark += 1
        try:
            pid = os.fork()
        except OSError as error:
            os.close(trouble)
            os.close(trouble_writer)
            self.send({"refused": message["run"], "error": f"fork: {error.strerror}"})
            return
        if pid == 0:
            os.close(trouble)
            self._become_agent(message, fds, trouble_writer)
        os.close(trouble_writer)
        with open(trouble, "rb") as reader:
            reason = reader.read(4096)
        self._agents[pid] = (message["run"], self._mark)
        if reason:
            del self._agents[pid]
            os.waitpid(pid, 0)
            self.send({"refused": message["run"], "error": reason.decode(errors="replace")})
        else:
            self.send({"started": message["run"], "pid": pid})

    def _become_agent(self, message: dict[str, Any], fds: list[int], trouble: int) -> NoReturn:
        """In the child: a session of its own, its own descriptors and environment, then the agent."""
        try:
            _enter_session(fds)
            _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
            resource.setrlimit(resource.RLIMIT_RTTIME, (self._mark, hard))
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for end in (self._control, self._wakeup, self._wakeup_writer):
                end.close()
            os.chdir(message["cwd"])
            if self._program is None:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.execvpe(message["argv"][0], message["argv"], {**self._environ, **message["env"]})
            os.environ.update(message["env"])
            os.close(trouble)
            os._exit(self._programs.run_program(self._program, message["argv"]))
        except BaseException as error:  # no child may ever go back into the server's loop
            with contextlib.suppress(OSError):
                os.write(trouble, str(error).encode())
        finally:
            os._exit(EXEC_FAILED)

    def _reap(self) -> None:
        """Report every agent that has ended, killing what it left, and bury every other orphan."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            agent = self._agents.pop(ended.si_pid, None)
            if agent is not None:
                _signal_group(ended.si_pid)  # its id cannot be reused while it is not reaped
            _, status = os.waitpid(ended.si_pid, 0)
            if agent is not None:
                self._kill_strays(agent[1])
                self.send({"exited": agent[0], "code": os.waitstatus_to_exitcode(status)})

    def _kill(self, run: str) -> None:
        for pid, (known, _) in self._agents.items():
            if known == run:
                _signal_group(pid)

    def _kill_strays(self, mark: int) -> None:
        """Kill orphans that carry the mark: they left their agent's process group."""
        for _ in range(KILL_ROUNDS_MAX):
            strays = [pid for pid in _children() if pid not in self._agents and _carries(pid, mark)]
            if not strays:
                return
            for pid in strays:
                _signal(pid)
                os.waitpid(pid, 0)  # its own children are ours now

    def kill_all(self) -> None:
        """Kill every descendant, however deep: each death hands its children to this process."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in self._agents:
            _signal_group(pid)
        for _ in range(KILL_ROUNDS_MAX):
            children = _children()
            if not children:
                return
            for pid in children:
                _signal(pid)
            for pid in children:
                os.waitpid(pid, 0)


def _enter_session(fds: list[int]) -> None:
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(EXEC_FAILED)
    os.setsid()
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    for fd in fds:
        os.close(fd)


def _neighbour(directory: str, name: str) -> Any:
    """A module beside this one, loaded under a name that no agent imports."""
    path = os.path.join(directory, f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_hone_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _terminate(*_: object) -> NoReturn:
    raise SystemExit(0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _threads() -> int:
    """Threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _carries(pid: int, mark: int) -> bool:
    try:
        return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0] == mark
    except (ProcessLookupError, PermissionError):
        return False


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _signal_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
