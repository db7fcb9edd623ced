from capture.ids import encode, new_id


def test_encode_is_crockford_base_32():
    assert encode(0) == "0" * 26
    assert encode(31) == "0" * 25 + "z"
    assert encode(32) == "0" * 24 + "10"
    assert encode(2**128 - 1) == "7" + "z" * 25


def test_ids_keep_the_order_of_time_and_never_repeat():
    assert encode(1 << 80) > encode((1 << 80) - 1)
    ids = [new_id("r") for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(id.startswith("r_") and len(id) == 28 for id in ids)
    assert [id[2:12] for id in ids] == sorted(id[2:12] for id in ids)  # the time's characters
