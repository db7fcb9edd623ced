"""What the fork server does before its first fork, so that no agent has to. Plain stdlib.

Three things, none of which an agent can tell from doing them itself:

- the third-party modules that the agent's file and its neighbours import are imported;
- known clients are used once against a server on the loopback device, which fills the caches
  that they keep in their modules (lazily imported resources, response schemas, platform names);
- certificate stores: every `httpx` client reads some 200 KB of PEM into a TLS context, 15-50 ms
  of CPU also where its URL is plain http. The contexts which the next clients will ask for are
  read before the fork, and each is handed out once in a process, only for the very arguments and
  environment it was made with. Anything else is made as ever.
"""

import ast
import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

FILES_MAX = 200
CONTEXTS = 4  # that are ready: a client needs one, and one more for each HTTP proxy it is told of
TLS_MODULES = ("httpx", "httpx2")
TLS_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
COMPLETION = (
    b'{"id":"warm","object":"chat.completion","created":1,"model":"warm","choices":[{"index":0,'
    b'"finish_reason":"tool_calls","message":{"role":"assistant","content":"","tool_calls":[{"id":"warm",'
    b'"type":"function","function":{"name":"warm","arguments":"{}"}}]}}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)


def preload(file: str, *, prepare_tls: bool) -> dict[str, Any]:
    """Import and warm up for an agent's file: `preloaded` module names, `failed` name -> why."""
    preloaded: list[str] = []
    failed: dict[str, str] = {}
    for name in third_party_imports(file):
        try:
            importlib.import_module(name)
        except Exception as error:  # the agent will meet the same, and may be prepared for it
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            preloaded.append(name)
    if "openai" in sys.modules:
        try:
            warm_openai()
        except Exception as error:  # a version that works otherwise: agents warm up themselves
            failed["openai (warm-up)"] = f"{type(error).__name__}: {error}"
    if prepare_tls:
        for name in TLS_MODULES:
            prepare_contexts(name)
    return {"preloaded": preloaded, "failed": failed}


def third_party_imports(file: str) -> list[str]:
    """Modules outside its directory that the file, or a neighbour it imports, imports at top level."""
    directory = os.path.dirname(os.path.realpath(file))
    names: dict[str, None] = {}
    waiting, seen = [os.path.realpath(file)], set[str]()
    while waiting and len(seen) < FILES_MAX:
        path = waiting.pop()
        seen.add(path)
        for name in imports_of(path):
            neighbour = _neighbour(directory, name)
            if neighbour is None:
                names[name] = None
            elif neighbour not in seen:
                waiting.append(neighbour)
    return list(names)


def imports_of(path: str) -> list[str]:
    """Absolute imports among a file's top-level statements, the bodies of `try` included."""
    try:
        with open(path, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return []  # the agent's run says what is wrong with it
    return list(_imports(tree.body))


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Try):
            yield from _imports(node.body)


def _neighbour(directory: str, name: str) -> str | None:
    """The file in the agent's directory that this module name means there, if any."""
    base = os.path.join(directory, *name.split("."))
    for path in (base + ".py", os.path.join(base, "__init__.py")):
        if os.path.isfile(path):
            return path
    top = os.path.join(directory, name.split(".")[0])
    return os.path.join(top, "__init__.py") if os.path.isdir(top) else None


def warm_openai() -> None:
    """One completion with a tool call by a client of `openai`, answered on the loopback device."""
    openai: Any = importlib.import_module("openai")
    tool = {"type": "function", "function": {"name": "warm", "parameters": {"type": "object"}}}
    with (
        answering() as url,
        openai.OpenAI(api_key="warm", base_url=url, timeout=5, max_retries=0) as client,
    ):
        for stream in (False, True):
            completion = client.chat.completions.create(
                model="warm", messages=[{"role": "user", "content": "warm"}], tools=[tool], stream=stream
            )
            if stream:
                completion.close()
            else:
                completion.choices[0].message.model_dump()


@contextlib.contextmanager
def answering() -> Iterator[str]:
    """A base URL where a child of this process answers each request with one fixed completion."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(20)
                _answer(listening)
            finally:
                os._exit(0)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _answer(listening: socket.socket) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
    while True:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as reader:
            length = 0
            while (line := reader.readline().strip().lower()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            reader.read(length)
            connection.sendall(head + str(len(COMPLETION)).encode() + b"\r\n\r\n" + COMPLETION)


def prepare_contexts(package: str) -> None:
    """Read the default certificates for the next `CONTEXTS` clients of `httpx` or its successor."""
    module: Any = sys.modules.get(f"{package}._transports.default")
    make: Any = getattr(module, "create_ssl_context", None)
    if make is None:
        return
    wanted = {"verify": True, "cert": None, "trust_env": True}
    environ = [os.environ.get(name) for name in TLS_VARIABLES]
    ready = [make(**wanted) for _ in range(CONTEXTS)]

    def create_ssl_context(*args: Any, **kwargs: Any) -> Any:
        same = not args and wanted | kwargs == wanted
        if ready and same and [os.environ.get(name) for name in TLS_VARIABLES] == environ:
            return ready.pop()
        return make(*args, **kwargs)

    module.create_ssl_context = create_ssl_context
