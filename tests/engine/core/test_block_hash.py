from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.core.block_hash import MAX_SALT_BYTES, hash_block

FIELDS = st.tuples(
    st.none() | st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 2**32), min_size=1, max_size=8),
    st.binary(max_size=33),
    st.binary(max_size=MAX_SALT_BYTES),
)
Fields = tuple[bytes | None, list[int], bytes, bytes]


def key(fields: Fields) -> bytes:
    parent, token_ids, selection_digest, cache_salt = fields
    return hash_block(parent=parent, token_ids=token_ids, selection_digest=selection_digest, cache_salt=cache_salt)


@given(first=FIELDS, second=FIELDS)
@settings(max_examples=200, deadline=None)
def test_keys_are_equal_exactly_when_all_fields_are(first: Fields, second: Fields) -> None:
    assert (key(first) == key(second)) == (first == second)


def test_each_field_alone_changes_the_key() -> None:
    base: Fields = (b"p" * 32, [1, 2, 3, 4], b"s" * 32, b"salt")
    others: list[Fields] = [
        (None, *base[1:]),
        (b"q" * 32, *base[1:]),
        (base[0], [1, 2, 3, 5], *base[2:]),
        (base[0], [1, 2, 4, 3], *base[2:]),
        (*base[:2], b"", base[3]),
        (*base[:3], b""),
        (*base[:3], b"tlas"),
    ]
    keys = [key(fields) for fields in [base, *others]]
    assert len(set(keys)) == len(keys)


def test_bytes_never_move_from_one_field_to_the_next() -> None:
    eight = (1).to_bytes(8, "little")
    assert key((None, [1], eight, b"")) != key((None, [1, 1], b"", b""))
    assert key((eight, [1], b"", b"")) != key((None, [1, 1], b"", b""))


def test_a_key_has_at_least_128_bits() -> None:
    assert len(key((None, [1], b"", b""))) >= 16
