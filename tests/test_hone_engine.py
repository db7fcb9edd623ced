"""vLLM's command line, word for word."""

import aiohttp
import pytest
from conftest import Engine

from capture.errors import ConfigError
from hone.engine import base_name, launch, offline, server_rank, versioned
from hone.settings import EngineSettings, PolicySettings

POLICY = PolicySettings(name="player", base_model="/models/base")

CPU = """
/py -m vllm.entrypoints.openai.api_server
--model /models/base --served-model-name player@base
--dtype float32 --logprobs-mode processed_logprobs --generation-config vllm
--enable-auto-tool-choice --tool-call-parser hermes
--enable-lora --max-loras 8 --max-lora-rank 8
--max-num-seqs 128 --max-model-len 1024 --block-size 32
--enforce-eager --distributed-executor-backend uni
--host 127.0.0.1 --port 8100
--uvicorn-log-level warning --disable-uvicorn-access-log --disable-fastapi-docs
--enable-scale-out
"""

CUDA = """
/py -m vllm.entrypoints.openai.api_server
--model /models/base --served-model-name player@base
--dtype auto --logprobs-mode processed_logprobs --generation-config vllm
--reasoning-parser qwen3
--enable-lora --max-loras 6 --max-lora-rank 64
--max-num-seqs 256 --gpu-memory-utilization 0.8
--host 127.0.0.1 --port 9000
--uvicorn-log-level warning --disable-uvicorn-access-log --disable-fastapi-docs
--enable-scale-out --enable-sleep-mode
"""

COMMON = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def test_the_command_on_a_cpu() -> None:
    start = launch(
        POLICY, EngineSettings(max_model_len=1024), lora_rank=4, hardware="cpu", cores=2, python="/py"
    )
    assert start.command == CPU.split()
    assert start.env == {
        **COMMON,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HONE_GROUPED_LORA": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_the_command_on_a_gpu() -> None:
    settings = EngineSettings(
        port=9000,
        tool_parser=None,
        reasoning_parser="qwen3",
        versions_max=6,
        max_seqs=256,
        gpu_memory_share=0.8,
        args=["--enable-sleep-mode"],
    )
    start = launch(POLICY, settings, lora_rank=33, hardware="cuda", cores=16, python="/py")
    assert start.command == CUDA.split()
    assert start.env == COMMON


def test_without_exact_continuity_its_routes_stay_shut() -> None:
    start = launch(POLICY, EngineSettings(), lora_rank=4, hardware="cpu", cores=2, python="/py", render=False)
    assert "--enable-scale-out" not in start.command


@pytest.mark.parametrize(("threads", "cores", "used"), [(None, 1, "1"), (None, 16, "8"), (3, 16, "3")])
def test_engine_threads(threads: int | None, cores: int, used: str) -> None:
    start = launch(
        POLICY, EngineSettings(threads=threads), lora_rank=8, hardware="cpu", cores=cores, python="/py"
    )
    assert start.env["OMP_NUM_THREADS"] == used


@pytest.mark.parametrize(
    ("rank", "served"), [(1, 1), (2, 8), (8, 8), (9, 16), (32, 32), (257, 320), (321, 512), (512, 512)]
)
def test_the_server_rank_is_the_smallest_that_holds_the_adapter(rank: int, served: int) -> None:
    assert server_rank(rank) == served


def test_a_rank_that_vllm_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.lora_rank is 513; vLLM serves at most 512"):
        server_rank(513)


def test_names_and_hub_access() -> None:
    assert versioned("policy", 17) == "policy@v17"
    assert offline({"A": "1"}, base_model_is_local=True) == {"A": "1", "HF_HUB_OFFLINE": "1"}
    assert offline({"A": "1"}, base_model_is_local=False) == {"A": "1"}


@pytest.mark.engine
async def test_the_real_engine_starts_from_this_command_and_does_what_hone_needs(engine: Engine) -> None:
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{engine.url}/v1/models") as response:
            models = (await response.json())["data"]
        assert [model["id"] for model in models if not model.get("parent")] == [base_name(engine.policy)]
        question = {
            "model": base_name(engine.policy),
            "messages": [{"role": "user", "content": "..."}],
            "max_tokens": 8,
            "temperature": 0.7,
            "logprobs": True,
            "return_token_ids": True,
        }
        async with client.post(f"{engine.url}/v1/chat/completions", json=question) as response:
            answer = await response.json()
        choice = answer["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
        assert answer["prompt_token_ids"]
        adapter = {"lora_name": "x", "lora_path": str(engine.adapter_dir / "missing")}
        async with client.post(f"{engine.url}/v1/load_lora_adapter", json=adapter) as response:
            refusal = await response.json()
        assert response.status == 404
        assert "No adapter found" in str(refusal)  # the route is there: it is the directory that is not


def test_layers_without_lora_cost_the_engine_nothing() -> None:
    start = launch(
        POLICY,
        EngineSettings(),
        lora_rank=8,
        targets=["o_proj", "down_proj"],
        hardware="cpu",
        cores=2,
        python="/py",
    )
    at = start.command.index("--lora-target-modules")
    assert start.command[at + 1 : at + 3] == ["o_proj", "down_proj"]
