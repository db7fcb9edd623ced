"""A Python file as the main program of a process that was forked. Plain stdlib, loaded by path."""

import atexit
import builtins
import contextlib
import importlib.machinery
import os
import sys
import threading
import traceback
import types


class Program:
    """A Python file and its code, compiled once for as long as the file stays as it is."""

    def __init__(self, file: str, stamp: tuple[int, int] | None) -> None:
        self.file = file
        self.stamp = stamp  # modification time in ns, size
        self.code: types.CodeType | None = None  # None: the run compiles it, and says what is wrong
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            self.code = self.compile()

    @classmethod
    def read(cls, file: str, known: "Program | None") -> "Program":
        """The program, `known` itself if the file has not changed."""
        stamp = None
        with contextlib.suppress(OSError):
            found = os.stat(file)
            stamp = (found.st_mtime_ns, found.st_size)
        return known if known is not None and known.stamp == stamp else cls(file, stamp)

    def compile(self) -> types.CodeType:
        """Its code; `OSError`, `SyntaxError` or `ValueError`."""
        with open(self.file, "rb") as source:
            return compile(source.read(), self.file, "exec", dont_inherit=True)


def run_program(program: Program, argv: list[str]) -> int:
    """Run a file as the main program, as `python file` does; the exit code."""
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.realpath(program.file))
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=program.file,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", program.file),
        __annotations__={},
        __cached__=None,
    )
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(program.code or program.compile(), module.__dict__)
    except SystemExit as stop:
        code = _exit_code(stop.code)
    except BaseException as error:  # the boundary at which an interpreter prints and exits with 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # our frames are not the agent's
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    return _finalise(code)


def _exit_code(value: object) -> int:
    """What Python makes of `sys.exit(value)`."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def _finalise(code: int) -> int:
    """What the interpreter does at its end: wait for threads, exit handlers, flush (120 if it fails)."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # as in the interpreter: said, and turned into its exit code
        with contextlib.suppress(Exception):
            traceback.print_exc()
        return 120
    return code
