"""What a frozen adapter says of a minibatch: computed once, however many passes there are."""

from torch import Tensor

from learner.batch import MicroBatch
from learner.model import Model, Tensors


class Frozen:
    """Logprobs by the micro-batch's number; the micro-batches of each pass are the same."""

    def __init__(self, model: Model, adapter: Tensors | None) -> None:
        self._model = model
        self._adapter = adapter  # None: the bare base
        self._found: dict[int, Tensor] = {}

    def logprobs(self, index: int, micro: MicroBatch) -> Tensor:
        """Those of the owned tokens [M] of micro-batch `index`, without gradient."""
        if index not in self._found:
            with self._model.under(self._adapter):
                self._found[index] = self._model.logprobs(micro)
        return self._found[index]

    def remember(self, index: int, logprobs: Tensor) -> None:
        """What the model has said while its weights were these."""
        self._found.setdefault(index, logprobs.detach())
