"""Checksums of pieces make the checksum of the whole."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from trainwright.checkpoint.crc32 import combine


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_the_checksum_of_two_pieces_is_zlibs_of_both(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
