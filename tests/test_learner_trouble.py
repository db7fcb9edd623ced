"""Memory that is too small and a disk that is full: training goes on, and nothing is lost or done twice."""

import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learner_world import World, make_base, settings
from test_learner_train import never, newest, same, weights, world_with

from capture.adapters import read_manifest
from capture.errors import ConfigError, StoreError
from learner import checkpoint
from learner.model import Model
from learner.settings import Settings
from learner.train import run
from learner.trouble import disk_full, out_of_memory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not out_of_memory(RuntimeError("shapes differ"))


def test_what_counts_as_a_full_disk() -> None:
    assert disk_full(OSError(errno.ENOSPC, "No space left on device"))
    assert disk_full(StoreError("the store failed: FullError: database or disk is full"))
    assert not disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not disk_full(StoreError("the store failed: no such table"))


def limited(world: World, config: Settings, spare_bytes: int) -> None:
    """Run a learner in a child that may map only so much more than it has with its model loaded."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            Model(config)  # whatever loads once is loaded
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, resource.RLIM_INFINITY))
            run(config, world.path, world.run_id, world.policy, never)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_out_of_memory_splits_the_micro_batches_and_trains_the_same(base: Path, tmp_path: Path) -> None:
    """The head of 64 tokens is small: with very many rows at once the hidden states do not fit."""
    plenty, short = (long_world(tmp_path / name) for name in ("plenty.db", "short.db"))
    wide = {"steps_max": 1, "micro_batch_tokens": 1 << 20, "mismatch_fraction": 0.0}
    run(settings(base, tmp_path / "a", **wide), plenty.path, plenty.run_id, plenty.policy, never)
    limited(short, settings(base, tmp_path / "b", **wide), 400 << 20)
    assert newest(short).state == "published"
    assert short.store.balance("policy") == plenty.store.balance("policy")
    found, expected = weights(newest(short)), weights(newest(plenty))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def long_world(path: Path) -> World:
    from learner_world import Attempt

    world = World(path)
    for first in (5, 6):
        prompts = [[first, member, *(7 + i % 50 for i in range(400))] for member in range(2, 34)]
        world.add_group([Attempt(prompt, [[8, 9, 10]], float(prompt[1] % 3)) for prompt in prompts])
    return world
