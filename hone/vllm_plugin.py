"""What vLLM loads of Hone: a general plugin, which does nothing but where `hone engine` asks for it."""

import os

GROUPED_LORA = "HONE_GROUPED_LORA"
"""Environment variable: `1` computes LoRA by adapter on the CPU (`hone.cpu_lora`)."""


def register() -> None:
    """Called once in each of vLLM's processes, before its model is made."""
    if os.environ.get(GROUPED_LORA) != "1":
        return
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.get_punica_wrapper = classmethod(lambda _: "hone.cpu_lora.GroupedLora")
