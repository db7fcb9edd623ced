import subprocess
import sys
from pathlib import Path

from rollouts.preload import imports_of, third_party_imports

ROOT = Path(__file__).parent.parent


def test_imports_are_those_at_top_level(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import os, a.b\nfrom c.d import e\nfrom . import f\n"
        "try:\n    import g\nexcept ImportError:\n    import h\n"
        "if True:\n    import i\ndef j():\n    import k\n"
    )
    assert imports_of(str(file)) == ["os", "a.b", "c.d", "g"]
    file.write_text("import os\n)(")
    assert imports_of(str(file)) == []


def test_neighbours_are_read_but_not_preloaded(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import json\nfrom tools import hammer\nimport board.cells\n")
    (tmp_path / "tools.py").write_text("import agent\nimport httpx\n")
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "__init__.py").write_text("")
    (tmp_path / "board" / "cells.py").write_text("import msgspec\n")
    assert sorted(third_party_imports(str(tmp_path / "agent.py"))) == ["httpx", "json", "msgspec"]


CONTEXTS = """
import os, ssl, sys
import httpx
import httpx._transports.default as default
from rollouts.preload import CONTEXTS, prepare_contexts

made = []
real = default.create_ssl_context
def counting(*args, **kwargs):
    made.append(real(*args, **kwargs))
    return made[-1]
default.create_ssl_context = counting

prepare_contexts("httpx")
assert len(made) == CONTEXTS == 4
os.environ["SSL_CERT_FILE"] = "/etc/ssl/certs/ca-certificates.crt"
if os.path.exists(os.environ["SSL_CERT_FILE"]):
    httpx.Client()
    assert len(made) == 5, "another certificate file asks for another context"
del os.environ["SSL_CERT_FILE"]
before = len(made)
httpx.Client(verify=False)
assert len(made) == before + 1, "other arguments ask for another context"
clients = [httpx.Client() for _ in range(5)]
assert len(made) == before + 2, "four were ready, the fifth was made"
contexts = [client._transport._pool._ssl_context for client in clients]
assert len({id(context) for context in contexts}) == 5, "none is handed out twice"
fresh = real(verify=True, cert=None, trust_env=True)
for context in contexts:
    assert context.get_ca_certs() == fresh.get_ca_certs()
    assert context.verify_mode == fresh.verify_mode and context.options == fresh.options
print("ok")
"""


def test_a_prepared_context_is_the_one_the_client_would_have_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONTEXTS], cwd=ROOT, env={}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ok\n", done.stderr


WARM = """
import sys, os
from rollouts.preload import preload
report = preload(sys.argv[1], prepare_tls=True)
assert report == {"preloaded": ["openai"], "failed": {"no_such_module": report["failed"]["no_such_module"]}}
assert "openai.resources.chat.completions.completions" in sys.modules
assert len(os.listdir("/proc/self/task")) == 1
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("ok")
"""


def test_warming_up_leaves_no_thread_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import openai\nimport no_such_module\n")
    command = [sys.executable, "-c", WARM, str(tmp_path / "agent.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "ok\n", done.stderr
