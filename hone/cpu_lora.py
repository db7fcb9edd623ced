"""LoRA on the CPU at the price of a few small matrix products. Runs inside vLLM; nothing of Hone imports it.

vLLM's own CPU code copies an adapter's matrices once for every token of a batch and multiplies them row
by row, which takes most of an engine's time on small models. Here all rows are multiplied at once with the
matrices of the few adapters that occur among them, and what is not a row's own is zeroed in between. Rows
without an adapter are left alone; the copying code gives them the adapter of the last slot.
"""

from typing import Any

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Tensor = Any


class Chosen:
    """Which adapter each of some rows uses.

    `indices` is int64 [rows]: an adapter's slot, -1 for none. `slots` holds those that occur, ascending;
    `own` is float32 [rows, slots, 1], 1 at each row's own slot, or None where all rows share one.
    """

    def __init__(self, indices: Tensor) -> None:
        found = indices.unique()
        self.slots: Tensor = found[found >= 0]
        self.own: Tensor | None = None
        if len(found) > 1:
            self.own = (indices[:, None] == self.slots).float()[:, :, None]

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """``y += scale * x @ A.T @ B.T`` in place, with each row's own A and B.

        `y` is [rows, outputs], `x` [rows, inputs], `a` [slots, 1, rank, inputs], `b` [slots, 1, width, rank];
        computed at float32, as vLLM does.
        """
        count, rank = len(self.slots), a.shape[2]
        if not count:
            return
        below = a[self.slots, 0].float().reshape(count * rank, -1)
        above = b[self.slots, 0].float().transpose(1, 2).reshape(count * rank, -1)
        low = x.float() @ below.t()
        if self.own is not None:
            low = (low.view(-1, count, rank) * self.own).view(-1, count * rank)
        change = low.mul_(scale) @ above
        width = min(y.shape[1], change.shape[1])  # adapter and model may be padded to different widths
        y[:, :width] += change[:, :width]


class GroupedLora(PunicaWrapperCPU):  # type: ignore[misc]  # untyped base
    """vLLM's CPU wrapper with its linear layers and logits computed by adapter instead of by token."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._of_tokens = Chosen(self.token_lora_indices)
        self._of_samples = Chosen(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        y, x, start = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            self._of_tokens.add(y[:, start : start + width], x, a, b, scale)
            start += width

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        self._of_samples.add(y, x, lora_a_stacked, lora_b_stacked, scale)
