"""The training loop: take groups, advantages, batch, loss, step, commit, publish.

GRPO with LoRA: centred advantages within a group, CISPO on the ratio learner/sampled, AdamW. Left
out of the paper's GRPO: division by the standard deviation (`advantage = "grpo"` has it), the KL
term (`kl_coef` has it), and length normalisation within a rollout: every owned token weighs the same
(`aggregation = "sequence_mean"` has it). `preset = "grpo"` is the paper's.

A batch commits before it is published. The checkpoint directory is complete on disk before the
store's transaction names it; that transaction is the commit, and it fails for a learner whose lease
went to another. Whatever dies in between is done again from the head that the store names.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import torch

from capture.errors import StoreError
from capture.sqlite import SqliteStore
from capture.store import Store
from capture.types import Batch, Commit, Version
from learner import groups as reading
from learner import trouble
from learner.clock import Clock
from learner.groups import Member
from learner.hold import Hold
from learner.lease import Lease
from learner.metrics import Metrics
from learner.mismatch import Watch
from learner.model import Model
from learner.settings import Settings
from learner.sinks import opened
from learner.staleness import staleness
from learner.sums import Sums
from learner.update import Abandoned, NonFinite, update

log = logging.getLogger(__name__)


def no_point(name: str) -> None:
    """The default of `on_point`: nothing happens."""


def run(
    settings: Settings,
    store_path: Path,
    run_id: str,
    policy: str,
    should_stop: Callable[[], bool],
    on_point: Callable[[str], None] = no_point,
) -> None:
    """Train `policy` for `run_id` until told to stop or `steps_max` is reached.

    `on_point` is called with "before_commit", "after_checkpoint", "after_commit" and "mid_publish".
    `Fenced`: another learner took over. `ConfigError`: a setting or the base model is wrong.
    """
    torch.set_num_threads(settings.threads)
    model = Model(settings)
    with (
        Lease(store_path, policy, settings.lease_wait_s, should_stop) as lease,
        Metrics(settings.metrics_host, settings.metrics_port, settings.steps_path) as metrics,
        closing(SqliteStore(store_path)) as store,
        closing(
            opened(
                settings.sinks, run_id, settings.sinks_project, Path(settings.sinks_dir), metrics.sink_failed
            )
        ) as metrics.sinks,
    ):
        learner = Learner(settings, model, store, lease, metrics, run_id, should_stop, on_point)
        while not should_stop() and not (learner.stands and learner.hold.finished):
            try:
                learner.turn()
            except Abandoned:
                return  # the batch stays taken; whoever starts next takes it again
            except (OSError, StoreError) as error:
                if not trouble.disk_full(error):
                    raise
                learner.wait_for_room(error)


class Learner:
    """The loop, top to bottom, on one lineage."""

    def __init__(
        self,
        settings: Settings,
        model: Model,
        store: Store,
        lease: Lease,
        metrics: Metrics,
        run_id: str,
        should_stop: Callable[[], bool],
        on_point: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.store = store
        self.lease = lease
        self.metrics = metrics
        self.run_id = run_id
        self.should_stop = should_stop
        self.on_point = on_point
        self.hold = Hold(settings, model, store, lease, run_id, on_point)
        self.watch = Watch(model, self.hold.versions, settings.mismatch_fraction)
        self.clock = Clock()
        self.stands = False  # on the lineage's head, with nothing left to publish

    def turn(self) -> None:
        """Look for a batch, and train it if there is one."""
        self.lease.check()
        if not self.stands:
            self.hold.resume()
            self.stands = True
        if self.hold.finished:
            return
        batch = self.take()
        if batch is None:
            time.sleep(self.settings.poll_s)
        else:
            self.train(batch)

    def take(self) -> Batch | None:
        """The next batch, or the one that an earlier learner took and never committed."""
        return self.store.take_batch(
            self.run_id,
            epoch=self.lease.epoch,
            groups=self.settings.groups_per_batch,
            batch_wait_s=self.settings.batch_wait_s,
            staleness_max=self.settings.staleness_max,
            unless=self.settings.unless,
        )

    def train(self, batch: Batch) -> None:
        """One batch, from its groups to a published version."""
        self.clock.lap("wait_s")
        groups = reading.read(self.store, batch, self.settings)
        numbers = reading.describe(groups) | staleness(groups, self.hold.versions, self.hold.lineage)
        self.clock.lap("data_s")
        numbers |= self.watch.compare(batch, groups, self.settings.micro_batch_tokens)
        self.clock.lap("mismatch_s")
        sums = self.step(batch, groups)
        seconds = self.clock.lap("forward_backward_s")
        if sums is None:
            return
        numbers |= sums.numbers() if sums.steps else {}
        numbers["tokens_per_s"] = sums.sample_tokens / seconds if sums.steps else 0.0
        version = self.commit(batch, groups, numbers, sums.steps)
        self.clock.lap("commit_s")
        if version is not None:
            self.hold.publish(version)
            self.clock.lap("publish_s")

    def step(self, batch: Batch, groups: Sequence[Sequence[Member]]) -> Sums | None:
        """The optimizer's steps. None: the batch was dropped, for it gave no finite gradient twice, or one of
        its samples does not fit into memory."""
        left, why = 2, ""
        while left:
            found = self.attempt(batch, groups)
            if isinstance(found, Sums):
                return found
            why = found
            self.hold.undo()
            if why == "out_of_memory":
                left = 2 if self.split(groups) else 0
            else:
                left -= 1
        self.store.drop_batch(batch.id, why, self.lease.epoch)
        self.metrics.dropped(why)
        return None

    def attempt(self, batch: Batch, groups: Sequence[Sequence[Member]]) -> Sums | str:
        """The optimizer's steps, or why there is no trusting the weights now."""
        try:
            hold, stop = self.hold, self.should_stop
            done = hold.lineage.step
            return update(self.settings, hold.model, hold.optimizer, groups, stop, done, hold.reference())
        except NonFinite as error:
            log.warning("batch %s: %s", batch.id, error)
            return "nonfinite"
        except (RuntimeError, MemoryError) as error:
            if not trouble.out_of_memory(error):
                raise
            return "out_of_memory"

    def split(self, groups: Sequence[Sequence[Member]]) -> bool:
        """Halve the micro-batches, from now on. False: every sample goes alone already.

        The batch begins again: its gradient is the same to rounding, however it is split.
        """
        self.hold.model.forget_gradients()
        trouble.release()
        self.metrics.out_of_memory()
        lengths = [len(one.token_ids) for group in groups for member in group for one in member.samples]
        tokens = trouble.halved(self.settings.micro_batch_tokens, lengths)
        if tokens is None:
            return False
        log.warning("out of memory: micro-batches of %d tokens from now on", tokens)
        self.settings = msgspec.structs.replace(self.settings, micro_batch_tokens=tokens)
        return True

    def commit(
        self, batch: Batch, groups: Sequence[Sequence[Member]], numbers: dict[str, float], steps: int
    ) -> Version | None:
        """Checkpoint, then the store's transaction. None: nothing had an advantage, so no new version."""
        self.lease.check()
        self.on_point("before_commit")
        members = [member for group in groups for member in group]
        lineage, head = self.hold.lineage, self.hold.head
        path, step = lineage.checkpoint or "", lineage.step + steps
        if steps:
            head, saved = self.hold.save(batch, members, steps)
            path = str(saved)
            self.on_point("after_checkpoint")
        numbers |= self.clock.seconds | {"step": float(step)}
        version = self.store.commit_batch(
            Commit(
                batch_id=batch.id,
                run_id=self.run_id,
                lineage=lineage.id,
                epoch=self.lease.epoch,
                step=step,
                checkpoint=path,
                rows=[member.ledger_row() for member in members if member.dropped is None],
                metrics=numbers,
                new_version=bool(steps),
                dropped={member.rollout.id: member.dropped for member in members if member.dropped},
            )
        )
        self.on_point("after_commit")
        self.hold.advance(head)
        numbers["version"] = float(self.hold.lineage.head_version)
        self.metrics.committed(batch.id, numbers, bool(steps))
        return version

    def wait_for_room(self, error: Exception) -> None:
        """The disk is full. What was not committed is undone; it is done again once there may be room."""
        log.error("the disk is full; training goes on when there is room: %s", error)
        self.metrics.disk_full()
        self.stands = False
        self.hold.undo()
        deadline = time.monotonic() + self.settings.disk_retry_s
        while time.monotonic() < deadline and not self.should_stop():
            time.sleep(self.settings.poll_s)
