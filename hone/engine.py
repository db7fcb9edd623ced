"""vLLM's command line and environment, as a pure function of settings.

What each flag is for stands beside it. The base model's name is no version's: version 0 may be an adapter.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from capture.errors import ConfigError
from hone.hardware import Hardware
from hone.settings import EngineSettings, PolicySettings
from hone.vllm_plugin import GROUPED_LORA

SERVER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Launch(msgspec.Struct, frozen=True):
    """A command and what it needs in its environment."""

    command: list[str]
    env: dict[str, str]


def versioned(policy: str, version: int) -> str:
    """The engine's name for one version of a policy."""
    return f"{policy}@v{version}"


def base_name(policy: str) -> str:
    """The engine's name for the bare base model of a policy."""
    return f"{policy}@base"


def server_rank(lora_rank: int) -> int:
    """The smallest rank vLLM can be started with that holds adapters of `lora_rank`."""
    for rank in SERVER_RANKS:
        if rank >= lora_rank:
            return rank
    raise ConfigError(f"train.lora_rank is {lora_rank}; vLLM serves at most {SERVER_RANKS[-1]}")


def launch(
    policy: PolicySettings,
    engine: EngineSettings,
    *,
    lora_rank: int,
    targets: Literal["all-linear"] | Sequence[str] = "all-linear",
    hardware: Hardware,
    cores: int,
    python: str,
    render: bool = True,
) -> Launch:
    """How to start vLLM for this policy; `ConfigError` for a rank that it cannot serve.

    `targets` are the layers that have LoRA: vLLM pays for every layer that could have it. `render`
    opens the routes that exact continuity needs; they cost nothing else.
    """
    return Launch(
        command=[
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *_model(policy, engine, hardware),
            *_adapters(engine, lora_rank, targets),
            *_capacity(engine, hardware),
            *_server(engine),
            *(["--enable-scale-out"] if render else []),
            *engine.args,
        ],
        env=_environment(engine, hardware, cores),
    )


def _model(policy: PolicySettings, engine: EngineSettings, hardware: Hardware) -> list[str]:
    args = ["--model", policy.base_model, "--served-model-name", base_name(policy.name)]
    args += ["--dtype", "float32" if (engine.dtype, hardware) == ("auto", "cpu") else engine.dtype]
    # Logprobs of the distribution that was sampled from, and no sampling defaults from the
    # model's own files: the learner recomputes softmax(logits / T) and nothing else.
    args += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if engine.tool_parser:
        args += ["--enable-auto-tool-choice", "--tool-call-parser", engine.tool_parser]
    if engine.reasoning_parser:
        args += ["--reasoning-parser", engine.reasoning_parser]
    return args


def _adapters(
    engine: EngineSettings, lora_rank: int, targets: Literal["all-linear"] | Sequence[str]
) -> list[str]:
    rank, live = str(server_rank(lora_rank)), str(engine.versions_max)
    args = ["--enable-lora", "--max-loras", live, "--max-lora-rank", rank]
    return args if targets == "all-linear" else [*args, "--lora-target-modules", *targets]


def _capacity(engine: EngineSettings, hardware: Hardware) -> list[str]:
    args = ["--max-num-seqs", str(engine.max_seqs)]
    if engine.max_model_len:
        args += ["--max-model-len", str(engine.max_model_len)]
    block_size = engine.block_size or (32 if hardware == "cpu" else None)
    if block_size:
        args += ["--block-size", str(block_size)]
    if hardware == "cpu":
        # The model runs inside the engine process. vLLM's default, a worker process of its own, spins
        # while it waits: on two cores that nearly doubles the CPU time of a request.
        return [*args, "--enforce-eager", "--distributed-executor-backend", "uni"]
    return [*args, "--gpu-memory-utilization", str(engine.gpu_memory_share)]


def _server(engine: EngineSettings) -> list[str]:
    quiet = ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    return ["--host", engine.host, "--port", str(engine.port), *quiet]


def _environment(engine: EngineSettings, hardware: Hardware, cores: int) -> dict[str, str]:
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(engine.keep_alive_s),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if hardware == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(engine.kv_cache_gb)
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM refuses the executor `uni` on CPUs
        env[GROUPED_LORA] = "1"
        env["OMP_NUM_THREADS"] = str(engine.threads or max(1, cores // 2))
    return env


def offline(env: Mapping[str, str], base_model_is_local: bool) -> dict[str, str]:
    """The environment with no calls to the model hub where the model is a local directory."""
    return {**env, "HF_HUB_OFFLINE": "1"} if base_model_is_local else dict(env)
