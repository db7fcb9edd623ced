"""A linear layer under LoRA: two large products, forward and back, and no large sum.

peft adds a second, thin path beside the layer, which costs more memory traffic than arithmetic. The
same function with the weights merged for the moment of use: y = x (W + s B A)ᵀ. The merged matrix is
made again in the backward pass, so it is never kept. In float32 the two differ by rounding only; with a
base in half precision they would not, for W + s B A would round away small adapters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn


class MergedLora(torch.autograd.Function):  # type: ignore[misc]
    """x [..., in], W [out, in], A [r, in], B [out, r] -> [..., out]; gradients by x, A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """The layer's output."""
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, torch.addmm(weight, b, a, alpha=scale), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """With g = dL/dy: dx = g (W + s B A), dA = (s g B)ᵀ x, dB = s gᵀ (x Aᵀ)."""
        x, weight, a, b = ctx.saved_tensors
        flat, g = x.flatten(0, -2), gradients[0].flatten(0, -2)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (g @ torch.addmm(weight, b, a, alpha=ctx.scale)).view_as(x)
        da = (g @ b).mul_(ctx.scale).T @ flat
        # Not gᵀ (x Aᵀ): products with a thin right side take as long as a square one.
        db = ((flat @ a.T).T @ g).mul_(ctx.scale).T
        return dx, None, None, da, db, None


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    """Stands where peft put its layer; shares its parameters."""

    def __init__(self, layer: PeftLinear) -> None:
        super().__init__()
        self.base = layer.get_base_layer()
        (name,) = layer.active_adapters
        self.a: Tensor = layer.lora_A[name].weight
        self.b: Tensor = layer.lora_B[name].weight
        self.scale: float = layer.scaling[name]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = MergedLora.apply(x, self.base.weight, self.base.bias, self.a, self.b, self.scale)
        return out


def replace_layers(model: nn.Module) -> None:
    """Put an `AdaptedLinear` in the place of every LoRA layer of a peft model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, PeftLinear):
                setattr(parent, name, AdaptedLinear(child))
