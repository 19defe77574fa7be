"""CRC-32 of a file from the checksums of its pieces, so that pieces may be written in any order and none is read again.

A checksum is a polynomial over GF(2); appending n zero bits multiplies it by x^n, modulo the polynomial of CRC-32.
Bits are reflected, as in zlib: the highest bit is the coefficient of x^0. Source: zlib's crc32_combine.
"""

from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE, _X_TO_THE_8TH = 1 << 31, 1 << 23


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of one text followed by another of `second_bytes` bytes, given the checksum of each."""
    return _multiply(_shift(second_bytes), first) ^ second


@cache  # a model has few different sizes of tensors
def _shift(num_bytes: int) -> int:
    result, power = _ONE, _X_TO_THE_8TH
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(result, power)
        power = _multiply(power, power)
        num_bytes >>= 1
    return result


def _multiply(left: int, right: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
