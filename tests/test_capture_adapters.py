import msgspec
import pytest

from capture.adapters import MANIFEST, Manifest, adapter_name, adapter_path, read_manifest
from capture.errors import AdapterError

GOOD = Manifest(
    policy="policy",
    version=17,
    parent=16,
    lineage="l_run1",
    step=20,
    sha256="ab" * 32,
    fingerprint="f",
    dtype="float32",
    lora_rank=8,
    canary_ids=[1, 2, 3],
    canary_logprobs=[-0.5, -0.25],
    parent_logprobs=[-1.0, -0.5],
    base_logprobs=[-2.0, -1.0],
    created_at=1.5,
)


def test_names_and_paths():
    assert adapter_name("policy", 17) == "policy@v17"
    assert str(adapter_path("/adapters", "policy", 17)) == "/adapters/policy@v17"


def test_a_manifest_reads_back(tmp_path):
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(GOOD))
    assert read_manifest(tmp_path) == GOOD


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", msgspec.json.encode(GOOD)[:-9]])
def test_a_damaged_manifest_is_an_adapter_error(tmp_path, body):
    (tmp_path / MANIFEST).write_bytes(body)
    with pytest.raises(AdapterError):
        read_manifest(tmp_path)


def test_a_directory_without_manifest_is_not_an_adapter(tmp_path):
    with pytest.raises(AdapterError):
        read_manifest(tmp_path)
