"""Whose call it is: every way of saying it, every namespace, every refusal."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from proxy_world import USER, FakeUpstream, World, capture_settings, completion, world

from proxy.attribution import ById, BySession, Nobody, decide
from proxy.keys import ALL, Caller, Keyring, bearer, rollout_of
from proxy.refusal import Refused
from proxy.settings import Key

BODY = {"model": "gpt", "messages": [USER]}
CHAT = "/v1/chat/completions"


def key(name: str, *scopes: Any) -> Key:
    return Key(id=name, sha256=hashlib.sha256(f"sk-{name}".encode()).hexdigest(), scopes=scopes)


KEYS = (key("ann", "infer", "train", "reward"), key("bob", "infer"), key("root", "admin"))


def auth(value: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}", **{k.replace("_", "-"): v for k, v in headers.items()}}


# -- the decision ---------------------------------------------------------------------------------

ANN = Caller(key_id="ann", scopes=frozenset({"infer"}))
OWN = Caller(key_id="ann", scopes=frozenset({"infer"}), rollout_id="r_own")


def test_path_then_rollout_key_then_headers_then_nobody() -> None:
    both = {"X-Rollout-ID": "r_h", "X-Session-ID": "s"}
    assert decide(ANN, "r_p", both) == ById("r_p", "path")
    assert decide(OWN, "r_own", both) == ById("r_own", "path")
    assert decide(OWN, None, both) == ById("r_own", "key")
    assert decide(ANN, None, both) == ById("r_h", "header")
    assert decide(ANN, None, {"X-Session-ID": "s"}) == BySession("s")
    assert decide(ANN, None, {"X-Session-ID": ""}) == Nobody()
    assert decide(ANN, None, {}) == Nobody()


def test_path_and_rollout_key_that_disagree_are_refused() -> None:
    with pytest.raises(Refused) as caught:
        decide(OWN, "r_other", {})
    assert (caught.value.status, caught.value.code) == (403, "rollout_mismatch")


def test_an_id_in_a_header_has_a_limit() -> None:
    with pytest.raises(Refused) as caught:
        decide(ANN, None, {"X-Session-ID": "s" * 257})
    assert caught.value.status == 400


def test_keys() -> None:
    assert bearer("Bearer  abc ") == "abc"
    assert bearer("bearer abc") == "abc"
    assert bearer("Basic abc") == bearer(None) == ""
    assert rollout_of("r_1.secret") == ("r_1", "secret")
    assert rollout_of("r_1.") is rollout_of("sk-1.x") is rollout_of("r_1") is None
    ring, nobodys = Keyring(KEYS), Keyring(())
    assert ring.identify("sk-bob") == Caller(key_id="bob", scopes=frozenset({"infer"}))
    assert ring.identify("sk-root").scopes == ALL
    assert nobodys.identify("anything") == nobodys.identify("") == Caller(key_id="local", scopes=ALL)
    for wrong in ("", "sk-nobody", "SK-bob"):
        with pytest.raises(Refused) as caught:
            ring.identify(wrong)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


# -- over the wire --------------------------------------------------------------------------------


async def call(hone: World, path: str = CHAT, headers: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Status, error code, rollout id."""
    status, answer, sent = await hone.post(path, BODY, headers)
    return status, answer.get("error", {}).get("code", ""), sent.get("x-hone-rollout-id", "")


async def test_without_keys_everybody_is_one_tenant(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url), tmp_path) as hone,
    ):
        opened = await hone.opened()
        own, path = opened["id"], f"/rollouts/{opened['id']}{CHAT}"
        other = await hone.opened()
        assert await call(hone, path) == (200, "", own)
        assert await call(hone, path, auth("sk-whatever")) == (200, "", own)
        assert await call(hone, path, auth(opened["api_key"])) == (200, "", own)
        assert await call(hone, CHAT, auth(opened["api_key"])) == (200, "", own)
        assert await call(hone, CHAT, {"X-Rollout-ID": own}) == (200, "", own)
        assert await call(hone, path, auth(other["api_key"])) == (403, "rollout_mismatch", "")
        assert await call(hone, CHAT, auth(f"{own}.wrong")) == (401, "invalid_api_key", "")
        assert await call(hone, f"/rollouts/r_unknown0{CHAT}") == (404, "rollout_not_found", "")
        seen = {raw.attribution for raw in hone.raw_calls() if raw.rollout_id == own}
        assert seen == {"path", "key", "header"}
        assert hone.store.rollout(own).call_count == 5


async def test_no_identity_is_a_headless_observe_rollout_each_time(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url), tmp_path) as hone,
    ):
        first, second = await call(hone), await call(hone)
        assert first[0] == second[0] == 200
        assert first[2] != second[2]
        rollout = hone.store.rollout(first[2])
        assert (rollout.headless, rollout.mode, rollout.group_id, rollout.call_count) == (
            True,
            "observe",
            None,
            1,
        )
        assert {raw.attribution for raw in hone.raw_calls()} == {"headless"}


async def test_a_session_is_one_observe_rollout_within_its_key(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url, keys=KEYS, head_ttl_s=0.0), tmp_path) as hone,
    ):
        ann = auth("sk-ann", X_Session_ID="s", X_Scenario_ID="sc", X_Group_ID="wish")
        first, again = await call(hone, CHAT, ann), await call(hone, CHAT, ann)
        bob = await call(hone, CHAT, auth("sk-bob", X_Session_ID="s"))
        assert first[2] == again[2]
        assert bob[2] not in ("", first[2])
        rollout = hone.store.rollout(first[2])
        assert (rollout.key_id, rollout.session, rollout.scenario_id) == ("ann", "s", "sc")
        assert (rollout.group_id, rollout.metadata) == (None, {"group_id": "wish"})
        assert (rollout.headless, rollout.call_count) == (False, 2)
        # A sealed session goes on in a new rollout.
        hone.store.seal_rollout(first[2], "completed")
        later = await call(hone, CHAT, ann)
        assert later[0] == 200
        assert later[2] not in ("", first[2])


async def test_ids_mean_something_within_their_key_only(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url, keys=KEYS), tmp_path) as hone,
    ):
        status, opened, _ = await hone.post("/rollouts", {"mode": "train"}, auth("sk-ann"))
        assert status == 201
        own, path = opened["id"], f"/rollouts/{opened['id']}{CHAT}"
        assert await call(hone, path) == (401, "invalid_api_key", "")
        assert await call(hone, path, auth("sk-nobody")) == (401, "invalid_api_key", "")
        assert await call(hone, path, auth("sk-bob")) == (404, "rollout_not_found", "")
        assert await call(hone, path, auth("sk-ann")) == (200, "", own)
        assert await call(hone, path, auth("sk-root")) == (200, "", own)
        assert await call(hone, path, auth(opened["api_key"])) == (200, "", own)
        assert await call(hone, CHAT, auth("r_unknown0.secret")) == (401, "invalid_api_key", "")
        # In a header the id of another key's rollout is a name like any other.
        bob = await call(hone, CHAT, auth("sk-bob", X_Rollout_ID=own))
        assert bob[0] == 200
        assert bob[2] not in ("", own)
        assert hone.store.rollout(bob[2]).key_id == "bob"
        assert await call(hone, CHAT, auth("sk-bob", X_Rollout_ID=own)) == bob
        assert {raw.key_id for raw in hone.raw_calls() if raw.rollout_id == own} == {"ann"}


async def test_ids_of_another_key_are_404_whatever_is_asked(tmp_path: Path) -> None:
    eve = key("eve", "infer", "train", "reward")  # may do everything, in its own namespace
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url, keys=(*KEYS, eve)), tmp_path) as hone,
    ):
        ann, eve_key = auth("sk-ann"), auth("sk-eve")
        _, opened, _ = await hone.post("/rollouts", {"mode": "train", "group_id": "g_ann"}, ann)
        own = opened["id"]
        _, _, headers = await hone.post(f"/rollouts/{own}{CHAT}", BODY, ann)
        observed = (await call(hone, CHAT, auth("sk-ann", X_Session_ID="s")))[2]
        score = {"name": "x", "value": 1}
        finish = {"status": "completed"}
        asked = [
            *[(f"/rollouts/{id}{CHAT}", BODY) for id in (own, observed)],
            *[(f"/rollouts/{id}/finish", finish) for id in (own, observed)],
            *[("/rewards", {**score, "rollout_id": id}) for id in (own, observed)],
            ("/rewards", {**score, "call_id": headers["x-hone-call-id"]}),
            ("/rollouts", {"mode": "train", "group_id": "g_ann"}),
        ]
        for path, body in asked:
            status, answer, _ = await hone.post(path, body, eve_key)
            assert status == 404, (path, answer)
            assert own not in answer["error"]["message"] or own in json.dumps([path, body])
        for path in (f"/rollouts/{own}", f"/rollouts/{own}/v1/models"):
            assert (await hone.get(path, eve_key))[0] == 404
            assert (await hone.get(path, ann))[0] == 200
        for path, body in asked:
            assert (await hone.post(path, body, ann))[0] in (200, 201), path
        assert hone.store.rollout(own).status == hone.store.rollout(observed).status == "completed"
        assert hone.store.group("g_ann").state == "open"


async def test_calls_past_max_calls_and_after_sealing_are_refused_for_good(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url, head_ttl_s=0.0), tmp_path) as hone,
    ):
        opened = await hone.opened(max_calls=2)
        path = f"/rollouts/{opened['id']}{CHAT}"
        assert [(await call(hone, path))[0] for _ in range(2)] == [200, 200]
        status, answer, headers = await hone.post(path, BODY)
        assert (status, answer["error"]["code"], headers["x-should-retry"]) == (429, "max_calls", "false")
        hone.store.seal_rollout(opened["id"], "max_calls")  # elsewhere: the cached head is read again
        status, answer, headers = await hone.post(path, BODY)
        assert (status, answer["error"]["code"], headers["x-should-retry"]) == (
            409,
            "rollout_sealed",
            "false",
        )
        assert hone.store.rollout(opened["id"]).call_count == 2


async def test_a_sealed_observe_rollout_is_continued_by_one_new_rollout(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url, head_ttl_s=0.0), tmp_path) as hone,
    ):
        _, _, old = await call(hone)
        hone.store.seal_rollout(old, "completed")
        path = f"/rollouts/{old}{CHAT}"
        first, second = await call(hone, path), await call(hone, path)
        assert first == second
        assert first[0] == 200
        assert first[2] != old
        assert hone.store.rollout(first[2]).metadata == {"continues": old}
