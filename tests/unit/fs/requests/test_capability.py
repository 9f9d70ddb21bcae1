"""Capabilities: what was signed is allowed, to whom it was given, until it expires; nothing else is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.fs.core.capability import MAX_FILES, MAX_LIFETIME_S, Capability, Rights, derive_key, sign, verify

SECRET = b"s" * 32
KEYS = {number: derive_key(SECRET, number) for number in (1, 2)}
ONE = Capability(2, "ann", 7, 100, 199, Rights.READ, 2000)
TOKEN = sign(ONE, KEYS[2])


def test_what_was_signed_is_allowed_to_its_user_until_it_expires() -> None:
    assert verify(TOKEN, KEYS, "ann", 1999.9) == ONE
    assert [ONE.allows(file, Rights.READ, 1999) for file in (99, 100, 199, 200)] == [False, True, True, False]
    assert not ONE.allows(100, Rights.READ, 2000)
    assert not ONE.allows(100, Rights.WRITE, 0)
    assert not ONE.allows(100, Rights.READ | Rights.WRITE, 0)
    for user, now_s in (("bob", 1999), ("ann", 2000)):
        with pytest.raises(PermissionDenied):
            verify(TOKEN, KEYS, user, now_s)


def test_a_key_that_is_not_used_any_more_or_never_was_is_refused() -> None:
    for keys in ({1: KEYS[1]}, {2: derive_key(b"x" * 32, 2)}, {2: KEYS[1]}, {}):
        with pytest.raises(PermissionDenied, match="key of this cluster"):
            verify(TOKEN, keys, "ann", 1000)
    with pytest.raises(PermissionDenied):
        verify(sign(msgspec.structs.replace(ONE, key_id=9), b""), KEYS, "ann", 1000)


@settings(max_examples=200)
@given(token=st.binary(max_size=300), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_other_bytes_are_allowed_anything(token: bytes, at: int, bit: int) -> None:
    flipped = bytearray(TOKEN)
    flipped[at % len(flipped)] ^= 1 << bit
    for wrong in (token, bytes(flipped), TOKEN + b"\0", TOKEN[:-1], b""):
        with pytest.raises(PermissionDenied):
            verify(wrong, KEYS, "ann", 1000)


def test_lifetime_and_files_are_bounded() -> None:
    later = msgspec.structs.replace(ONE, expires_s=1000 + MAX_LIFETIME_S + 3600)
    with pytest.raises(PermissionDenied, match="too long"):
        verify(sign(later, KEYS[2]), KEYS, "ann", 1000)
    for last in (99, 100 + MAX_FILES):
        with pytest.raises(UsageError, match="files"):
            sign(msgspec.structs.replace(ONE, last_file=last), KEYS[2])
    with pytest.raises(UsageError, match="is too long for a capability"):
        sign(msgspec.structs.replace(ONE, user="ä" * 300), KEYS[2])
