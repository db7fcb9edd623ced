"""One process's hold on a lineage: the weights, the optimizer, and the head they stand on.

The head is the last checkpoint whose commit the store has; whatever is done past it can be undone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from capture import evaluations
from capture.store import Store
from capture.types import Batch, Lineage, Version
from learner import canary, checkpoint, publish
from learner.checkpoint import Checkpoint, State
from learner.continuing import refuse_other
from learner.groups import Member
from learner.lease import Lease
from learner.model import Model, Tensors, rounded
from learner.settings import Settings
from learner.versions import Versions


class Hold:
    """What trains, and where it stands. Only `resume` and `advance` move the head."""

    def __init__(
        self,
        settings: Settings,
        model: Model,
        store: Store,
        lease: Lease,
        run_id: str,
        on_point: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.model = model
        self.store = store
        self.lease = lease
        self.run_id = run_id
        self.on_point = on_point
        self.optimizer = torch.optim.AdamW(
            model.parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self.lineage: Lineage = store.lineage(run_id)
        self.versions = Versions(store.versions(self.lineage.policy), settings.versions_kept, settings.dtype)
        self.head = self.snapshot(State(lineage=self.lineage.id, step=0, batch_id="", rollout_ids=[]))

    @property
    def finished(self) -> bool:
        """Whether the lineage has had all its steps."""
        return self.settings.steps_max is not None and self.lineage.step >= self.settings.steps_max

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are written."""
        return Path(self.settings.checkpoint_dir)

    # -- to the head, and back to it ---------------------------------------------------------------

    def resume(self) -> None:
        """Stand on the lineage's head: its checkpoint loaded, orphans gone, its version published."""
        self.lineage = self.store.lineage(self.run_id)
        head = Path(self.lineage.checkpoint) if self.lineage.checkpoint else None
        checkpoint.sweep(self.checkpoints, self.lineage.id, head, self.lineage.step)
        publish.sweep(self.settings, self.lineage.policy)
        self.versions.read(self.store.versions(self.lineage.policy))
        origin = self.versions.origin(self.lineage.head_version)
        if origin is not None:
            refuse_other(self.settings, self.model, origin)
        if head is not None:
            self.head = checkpoint.load(head)
            self.undo()
            self._publish_head()
        else:
            start = self.versions.adapter(self.lineage.start_version)
            if start is not None:  # where it is the base, a fresh adapter is the same function
                self.model.load(start)
                self.head = self.snapshot(self.head.state)

    def undo(self) -> None:
        """Undo whatever happened since the head."""
        self.model.load(self.head.adapter)
        checkpoint.restore_optimizer(self.optimizer, self.model.parameters, self.head.optimizer)
        torch.set_rng_state(self.head.rng)

    # -- past the head -----------------------------------------------------------------------------

    def save(self, batch: Batch, members: Sequence[Member], steps: int) -> tuple[Checkpoint, Path]:
        """The checkpoint after `steps` more that this batch gave, on disk. Nothing names it yet."""
        made = self.snapshot(self._state(batch, members, steps), self._next_reference(steps))
        return made, checkpoint.save(made, self.checkpoints, self.lease.epoch).absolute()

    def advance(self, head: Checkpoint) -> None:
        """The store has committed this checkpoint. Prune those that need not stay."""
        self.head, self.lineage = head, self.store.lineage(self.run_id)
        last, every = self.settings.keep_last, self.settings.save_every
        checkpoint.prune(self.checkpoints, self.lineage.id, last, every, self._steps_kept())

    def publish(self, version: Version) -> None:
        """Make a committed version an adapter that engines can load; again after a crash."""
        path, digest = publish.publish(self.settings, self.model, version, self.head, self.on_point)
        absolute = str(path.absolute())
        self.store.publish_version(version.policy, version.version, absolute, digest, self.lease.epoch)
        self.versions.add(msgspec.structs.replace(version, path=absolute), self.head.adapter)

    def _publish_head(self) -> None:
        """Publish the head's version if that did not happen yet."""
        for version in self.store.versions(self.lineage.policy):
            if version.version == self.lineage.head_version and version.state == "committed":
                self.publish(version)

    def _steps_kept(self) -> set[int]:
        """The steps whose version did best in evaluation, or is still being evaluated."""
        versions = set(self.store.pinned_versions(self.lineage.policy))
        best = evaluations.best(evaluations.recorded(self.store, self.run_id))
        return self.versions.steps(versions if best is None else {*versions, best})

    # -- what a checkpoint holds -------------------------------------------------------------------

    def snapshot(self, state: State, reference: Tensors | None = None) -> Checkpoint:
        """The weights, the optimizer and the RNG as they are now; `reference` of the KL, None: version 0."""
        return Checkpoint(
            adapter=self.model.adapter(),
            reference=reference,
            optimizer=checkpoint.optimizer_tensors(self.optimizer, self.model.parameters),
            rng=torch.get_rng_state(),
            state=state,
        )

    def reference(self) -> Tensors | None:
        """What the KL penalty pulls to, as an adapter; None: the bare base."""
        if not self.settings.kl_coef:
            return None
        refreshed = self.head.reference if self.settings.ref_refresh_steps else None
        return self.versions.adapter(0) if refreshed is None else refreshed

    def _next_reference(self, steps: int) -> Tensors | None:
        """The same after so many steps more, where it is not version 0 any longer."""
        every, done = self.settings.ref_refresh_steps, self.lineage.step
        if every is None:
            return None
        return self.model.adapter() if (done + steps) // every > done // every else self.head.reference

    def _state(self, batch: Batch, members: Sequence[Member], steps: int) -> State:
        """What the new checkpoint says, with the canary of the version that it will become."""
        trained = sorted((m for m in members if m.signal), key=lambda m: -abs(m.signal))
        new = rounded(self.model.adapter(), self.settings.dtype)
        parent = self.versions.adapter(self.lineage.head_version)
        samples = [sample for member in trained for sample in member.samples[:1]]
        return State(
            lineage=self.lineage.id,
            step=self.lineage.step + steps,
            batch_id=batch.id,
            rollout_ids=[member.rollout.id for member in members],
            canary=canary.choose(self.model, samples, new, parent, self.settings.canary_tokens),
        )
