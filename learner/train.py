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

from capture import evaluations
from capture.errors import StoreError
from capture.sqlite import SqliteStore
from capture.store import Store
from capture.types import Batch, Commit, Lineage, Version
from learner import canary, checkpoint, mismatch, publish, trouble
from learner import groups as reading
from learner.checkpoint import Checkpoint, State
from learner.clock import Clock
from learner.continuing import refuse_other
from learner.groups import Member
from learner.lease import Lease
from learner.metrics import Metrics
from learner.model import Model, Tensors, rounded
from learner.settings import Settings
from learner.sinks import opened
from learner.staleness import staleness
from learner.sums import Sums
from learner.update import Abandoned, NonFinite, update
from learner.versions import Versions

WRONG_ADAPTER_EVERY = 10  # batches between negative controls of the mismatch

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
        while not should_stop() and not (learner.stands and learner.finished):
            try:
                learner.turn()
            except Abandoned:
                return  # the batch stays taken; whoever starts next takes it again
            except (OSError, StoreError) as error:
                if not trouble.disk_full(error):
                    raise
                learner.wait_for_room(error)


class Learner:
    """One process's hold on a lineage: the weights, the optimizer, and the head they stand on."""

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
        self.model = model
        self.store = store
        self.lease = lease
        self.metrics = metrics
        self.run_id = run_id
        self.should_stop = should_stop
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
        self.batches = 0
        self.controls = 0  # negative controls measured
        self.clock = Clock()
        self.stands = False  # on the lineage's head, with nothing left to publish

    @property
    def finished(self) -> bool:
        """Whether the lineage has had all its steps."""
        return self.settings.steps_max is not None and self.lineage.step >= self.settings.steps_max

    # -- the loop, top to bottom -------------------------------------------------------------------

    def turn(self) -> None:
        """Look for a batch, and train it if there is one."""
        self.lease.check()
        if not self.stands:
            self.resume()
        if self.finished:
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
        numbers = reading.describe(groups) | staleness(groups, self.versions, self.lineage)
        self.clock.lap("data_s")
        numbers |= self.compare(batch, groups)
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
            self.publish(version)
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
            self.restore(self.head)
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
            done, stop = self.lineage.step, self.should_stop
            return update(self.settings, self.model, self.optimizer, groups, stop, done, self.reference())
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
        self.model.forget_gradients()
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
        path = self.lineage.checkpoint or ""
        head = self.head
        if steps:
            head = self.snapshot(self.state(batch, groups, steps), self.next_reference(steps))
            path = str(checkpoint.save(head, self.checkpoints, self.lease.epoch).absolute())
            self.on_point("after_checkpoint")
        numbers |= self.clock.seconds | {"step": float(self.lineage.step + steps)}
        version = self.store.commit_batch(
            Commit(
                batch_id=batch.id,
                run_id=self.run_id,
                lineage=self.lineage.id,
                epoch=self.lease.epoch,
                step=self.lineage.step + steps,
                checkpoint=path,
                rows=[member.ledger_row() for member in members if member.dropped is None],
                metrics=numbers,
                new_version=bool(steps),
                dropped={member.rollout.id: member.dropped for member in members if member.dropped},
            )
        )
        self.on_point("after_commit")
        self.head, self.lineage = head, self.store.lineage(self.run_id)
        numbers["version"] = float(self.lineage.head_version)
        self.metrics.committed(batch.id, numbers, bool(steps))
        self.batches += 1
        last, every = self.settings.keep_last, self.settings.save_every
        checkpoint.prune(self.checkpoints, self.lineage.id, last, every, self.steps_kept())
        return version

    def steps_kept(self) -> set[int]:
        """The steps whose version did best in evaluation, or is still being evaluated."""
        versions = set(self.store.pinned_versions(self.lineage.policy))
        best = evaluations.best(evaluations.recorded(self.store, self.run_id))
        return self.versions.steps(versions if best is None else {*versions, best})

    def publish(self, version: Version) -> None:
        """Make a committed version an adapter that engines can load; again after a crash."""
        path, digest = publish.publish(self.settings, self.model, version, self.head, self.on_point)
        absolute = str(path.absolute())
        self.store.publish_version(version.policy, version.version, absolute, digest, self.lease.epoch)
        self.versions.add(msgspec.structs.replace(version, path=absolute), self.head.adapter)

    # -- state -------------------------------------------------------------------------------------

    def wait_for_room(self, error: Exception) -> None:
        """The disk is full. What was not committed is undone; it is done again once there may be room."""
        log.error("the disk is full; training goes on when there is room: %s", error)
        self.metrics.disk_full()
        self.stands = False
        self.restore(self.head)
        deadline = time.monotonic() + self.settings.disk_retry_s
        while time.monotonic() < deadline and not self.should_stop():
            time.sleep(self.settings.poll_s)

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
            self.restore(checkpoint.load(head))
            self.publish_head()
        else:
            start = self.versions.adapter(self.lineage.start_version)
            if start is not None:  # where it is the base, a fresh adapter is the same function
                self.model.load(start)
                self.head = self.snapshot(self.head.state)
        self.stands = True

    def publish_head(self) -> None:
        """Publish the head's version if that did not happen yet."""
        for version in self.store.versions(self.lineage.policy):
            if version.version == self.lineage.head_version and version.state == "committed":
                self.publish(version)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are written."""
        return Path(self.settings.checkpoint_dir)

    def snapshot(self, state: State, reference: Tensors | None = None) -> Checkpoint:
        """The weights, the optimizer and the RNG as they are now; `reference` of the KL, None: version 0."""
        return Checkpoint(
            adapter=self.model.adapter(),
            reference=reference,
            optimizer=checkpoint.optimizer_tensors(self.optimizer, self.model.parameters),
            rng=torch.get_rng_state(),
            state=state,
        )

    def restore(self, head: Checkpoint) -> None:
        """Undo whatever happened since `head`."""
        self.model.load(head.adapter)
        checkpoint.restore_optimizer(self.optimizer, self.model.parameters, head.optimizer)
        torch.set_rng_state(head.rng)
        self.head = head

    def reference(self) -> Tensors | None:
        """What the KL penalty pulls to, as an adapter; None: the bare base."""
        if not self.settings.kl_coef:
            return None
        refreshed = self.head.reference if self.settings.ref_refresh_steps else None
        return self.versions.adapter(0) if refreshed is None else refreshed

    def next_reference(self, steps: int) -> Tensors | None:
        """The same after so many steps more, where it is not version 0 any longer."""
        every, done = self.settings.ref_refresh_steps, self.lineage.step
        if every is None:
            return None
        return self.model.adapter() if (done + steps) // every > done // every else self.head.reference

    def state(self, batch: Batch, groups: Sequence[Sequence[Member]], steps: int) -> State:
        """What the new checkpoint says, with the canary of the version that it will become."""
        members = [member for group in groups for member in group]
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

    # -- what is measured --------------------------------------------------------------------------

    def compare(self, batch: Batch, groups: Sequence[Sequence[Member]]) -> dict[str, float]:
        """The mismatch between engine and learner on some tokens of every version that sampled."""
        members = [member for group in groups for member in group]
        trained = [member for member in members if member.advantage] or members
        samples = [sample for member in trained for sample in member.samples]
        chosen = mismatch.choose(samples, self.settings.mismatch_fraction, batch.id)
        limit = self.settings.micro_batch_tokens
        found = {}
        for version, some in chosen.items():
            try:
                adapter = self.versions.adapter(version)
            except OSError as error:
                log.warning("version %d sampled, but its adapter is gone: %s", version, error)
                continue
            found[version] = mismatch.measure(self.model, some, version, adapter, limit)
        newest = max(chosen, default=0)
        wrong = None
        if newest and (self.controls == 0 or self.batches % WRONG_ADAPTER_EVERY == 0):
            wrong = mismatch.measure(self.model, chosen[newest], newest, None, limit)
            self.controls += 1
        return mismatch.report(found, wrong) | {"mismatch_missing": float(len(chosen) - len(found))}
