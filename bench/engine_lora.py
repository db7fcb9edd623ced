"""What LoRA costs vLLM on the CPU: multiplied by adapter (as `hone engine` has it) and by token (vLLM's own).

    python bench/engine_lora.py [--games 256] [--rounds 3]

Starts both engines, then plays the example's games through each in turn, 64 at once, with every second game
on another adapter of rank 8. CPU milliseconds of all of an engine's processes per call; the last line is
JSON, medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

EXAMPLE = Path(__file__).parent.parent / "examples" / "tictactoe"
sys.path[:0] = [str(EXAMPLE), str(EXAMPLE.parent.parent)]

from agent import NO_CALL, TOOLS, decode, opening  # noqa: E402
from game import Game  # noqa: E402

from hone.engine import launch, offline  # noqa: E402
from hone.settings import EngineSettings, PolicySettings  # noqa: E402
from hone.vllm_plugin import GROUPED_LORA  # noqa: E402

RANK, AT_ONCE, READY_S, CALLS_MAX = 8, 64, 180, 12
ADAPTERS = ("one", "two")


@contextmanager
def engine(grouped: bool, scratch: Path) -> Iterator[tuple[str, int]]:
    """A vLLM on a free port: its URL and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = launch(
        PolicySettings(name="policy", base_model=str(EXAMPLE / "base")),
        EngineSettings(port=port, max_model_len=1024, device="cpu"),
        lora_rank=RANK,
        hardware="cpu",
        cores=os.cpu_count() or 1,
        python=sys.executable,
    )
    env = {**os.environ, **offline(start.env, base_model_is_local=True), GROUPED_LORA: str(int(grouped))}
    with (scratch / f"engine-{grouped}.log").open("wb") as log:
        process = subprocess.Popen(start.command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def write_adapters(scratch: Path) -> None:
    """Random ones, on all linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(EXAMPLE / "base", dtype=torch.float32)
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(base, config)
        for key, tensor in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(tensor, std=0.02)
        model.save_pretrained(scratch / name)


async def ready(client: aiohttp.ClientSession, url: str, scratch: Path) -> None:
    """Wait until it answers; load the adapters."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            async with client.get(f"{url}/health") as response:
                if response.status == 200:
                    break
        except aiohttp.ClientError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"vLLM does not start; its log is in {scratch}")
        await asyncio.sleep(0.5)
    for name in ADAPTERS:
        adapter = {"lora_name": name, "lora_path": str(scratch / name)}
        async with client.post(f"{url}/v1/load_lora_adapter", json=adapter) as response:
            response.raise_for_status()


async def play(client: aiohttp.ClientSession, url: str, model: str, game: Game) -> int:
    """One game, as the agent plays it; its calls."""
    messages: list[Any] = [dict(message) for message in opening(game)]
    for calls in range(1, CALLS_MAX + 1):
        body = {"model": model, "messages": messages, "tools": TOOLS, "max_tokens": 64, "logprobs": True}
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            message = (await response.json())["choices"][0]["message"]
        if game.result:
            return calls
        made = message.get("tool_calls") or []
        messages.append({"role": "assistant", "content": message.get("content") or "", "tool_calls": made})
        for call in made:
            result = game.call(call["function"]["name"], decode(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not made:
            del messages[-1]["tool_calls"]
            messages.append({"role": "user", "content": game.error(NO_CALL)})
    return CALLS_MAX


async def cost(client: aiohttp.ClientSession, url: str, pid: int, games: int, seed: int) -> float:
    """CPU milliseconds a call."""
    rng, gate = random.Random(seed), asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> int:
        game = Game(seed=rng.randrange(10**6), p=0.5, x_starts=bool(index % 2))
        async with gate:
            return await play(client, url, ADAPTERS[index // 2 % 2], game)

    before = cpu_s(pid)
    calls = sum(await asyncio.gather(*map(one, range(games))))
    return 1000 * (cpu_s(pid) - before) / calls


def cpu_s(pid: int) -> float:
    """Of a process and all its descendants that live."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_s(int(child)) for child in children)


async def measure(scratch: Path, games: int, rounds: int) -> dict[str, float]:
    found: dict[bool, list[float]] = {True: [], False: []}
    connector = aiohttp.TCPConnector(limit=0)
    with ExitStack() as stack:
        engines = {grouped: stack.enter_context(engine(grouped, scratch)) for grouped in found}
        async with aiohttp.ClientSession(connector=connector) as client:
            for url, pid in engines.values():
                await ready(client, url, scratch)
                await cost(client, url, pid, AT_ONCE, seed=0)  # warms up
            for seed in range(1, rounds + 1):
                for grouped, (url, pid) in engines.items():
                    found[grouped].append(await cost(client, url, pid, games, seed))
                    kind = "by adapter" if grouped else "by token"
                    print(f"round {seed}  {kind:10}  {found[grouped][-1]:.1f} ms of CPU a call", flush=True)
    ours, theirs = statistics.median(found[True]), statistics.median(found[False])
    return {"by_adapter_ms": ours, "by_token_ms": theirs, "ratio": ours / theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--games", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_adapters(Path(scratch))
        print(json.dumps(asyncio.run(measure(Path(scratch), args.games, args.rounds))))


if __name__ == "__main__":
    main()
