"""Export to an object store: a real S3 protocol, spoken by a server of this machine."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from learner_world import World, make_base, random_group, settings
from moto import server as moto
from transformers import AutoModelForCausalLM

from capture.adapters import read_manifest
from learner.train import run

ROOT = Path(__file__).parent.parent
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
Hone = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server's URL; its bucket is `box`."""
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    files(url).mkdir("box")
    yield url
    server.stop()


def files(url: str) -> Any:
    """The store as another client sees it."""
    import s3fs

    keys = {"key": KEYS["AWS_ACCESS_KEY_ID"], "secret": KEYS["AWS_SECRET_ACCESS_KEY"]}
    return s3fs.S3FileSystem(**keys, endpoint_url=url, use_listings_cache=False, skip_instance_cache=True)


@pytest.fixture(scope="module")
def hone(tmp_path_factory: pytest.TempPathFactory, s3: str) -> Hone:
    """`hone adapters export 1 --to ...` where version 1 exists, in a process with the server's address."""
    scratch = tmp_path_factory.mktemp("trained")
    base = make_base(scratch / "base")
    world = World(scratch / "hone.db")
    world.add_group(random_group(random.Random(1)))
    config = settings(base, scratch, groups_per_batch=1, steps_max=1)
    run(config, world.path, world.run_id, world.policy, lambda: False)
    world.store.close()
    text = f"[policy]\nbase_model = '{base}'\n[capture]\npath = '{world.path}'\n[train]\nlora_rank = 4\n"
    (scratch / "hone.toml").write_text(text)

    def export(to: str, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "hone.cli.main", "adapters", "export", "1", "--to", to, *words]
        env = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": s3, "PYTHONPATH": str(ROOT), **environ}
        return subprocess.run(
            [*command, "-c", str(scratch / "hone.toml")], capture_output=True, text=True, env=env, check=False
        )

    return export


def test_the_adapter_and_the_merged_model_arrive_whole(hone: Hone, s3: str, tmp_path: Path) -> None:
    adapter, merged = hone("s3://box/runs/v1"), hone("s3://box/merged/", "--merge", "--json")
    assert (adapter.returncode, adapter.stderr, merged.returncode) == (0, "", 0), merged.stderr
    assert adapter.stdout == "policy@v1, the adapter: s3://box/runs/v1\n"
    assert json.loads(merged.stdout)["to"] == "s3://box/merged"
    fs = files(s3)
    names = {path.rpartition("/")[2] for path in fs.ls("box/runs/v1")}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}
    fs.get("box/runs/v1", str(tmp_path / "v1"), recursive=True)
    assert read_manifest(tmp_path / "v1").version == 1
    fs.get("box/merged", str(tmp_path / "merged"), recursive=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").num_parameters() > 10_000
    written = {entry["name"]: entry["LastModified"] for entry in fs.ls("box/merged", detail=True)}
    assert written["box/merged/hone.json"] == max(written.values())  # in whole seconds


def test_what_is_there_is_not_written_over(hone: Hone, s3: str) -> None:
    fs = files(s3)
    fs.pipe("box/kept/deep/file", b"mine")
    found = hone("s3://box/kept")
    assert found.returncode == 1
    assert "s3://box/kept is there already" in found.stderr
    assert fs.find("box/kept") == ["box/kept/deep/file"]
    fs.pipe("box/file", b"mine")
    assert "is there already" in hone("s3://box/file").stderr
    assert fs.cat("box/file") == b"mine"


def test_what_the_store_says_becomes_a_sentence(hone: Hone) -> None:
    found = hone("s3://no-such-bucket/v1")
    assert found.returncode == 1
    assert found.stderr.startswith("hone adapters: s3://no-such-bucket/v1: ")
    assert "Traceback" not in found.stderr


def test_a_missing_backend_names_its_extra(hone: Hone) -> None:
    found = hone("gs://box/v1")  # gcsfs is not installed beside the tests
    assert found.returncode == 1
    assert "pip install 'hone[gcs]'" in found.stderr
