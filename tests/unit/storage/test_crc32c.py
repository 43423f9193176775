import ctypes
import os

import pytest

from mlp_offload import _native


def bitwise(data: bytes) -> int:
    """Castagnoli's CRC from its definition, one bit at a time."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


FUNCTIONS = pytest.mark.parametrize("crc", [_native.crc32c, _native.crc32c_portable], ids=["fastest", "portable"])
STREAMS = 3 * 4096  # bytes that the interleaved loop takes at once


@FUNCTIONS
def test_published_values(crc) -> None:
    # RFC 3720, B.4, and the customary check value
    for data, value in (
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ):
        buffer = ctypes.create_string_buffer(data, len(data))
        assert crc(ctypes.addressof(buffer), len(data)) == value


@FUNCTIONS
@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 4095, STREAMS - 1, STREAMS, STREAMS + 1, 2 * STREAMS + 513])
def test_equals_the_definition_at_every_edge_and_misalignment(crc, nbytes: int) -> None:
    data = os.urandom(nbytes + 3)
    address = ctypes.addressof(buffer := ctypes.create_string_buffer(data))
    for shift in (0, 1, 3):
        assert crc(address + shift, nbytes) == bitwise(buffer.raw[shift : shift + nbytes])


@FUNCTIONS
def test_continues_from_an_initial_value_and_combines(crc) -> None:
    data = os.urandom(2 * STREAMS + 77)
    address = ctypes.addressof(buffer := ctypes.create_string_buffer(data))
    whole = crc(address, len(data))
    for cut in (0, 1, 513, STREAMS, len(data) - 1, len(data)):
        first, second = crc(address, cut), crc(address + cut, len(data) - cut)
        assert crc(address + cut, len(data) - cut, first) == whole
        assert _native.crc32c_combine(first, second, len(data) - cut) == whole
    assert buffer.raw[:-1] == data


def test_combines_lengths_past_32_bits() -> None:
    """A and 2^33 zero bytes after it: appended in one combination, and in two of 2^32."""
    once = _native.crc32c_combine(0x12345678, crc_of_zeros(33), 1 << 33)
    half = _native.crc32c_combine(0x12345678, crc_of_zeros(32), 1 << 32)
    assert once == _native.crc32c_combine(half, crc_of_zeros(32), 1 << 32)
    assert crc_of_zeros(16) == bitwise(bytes(1 << 16))


def crc_of_zeros(exponent: int) -> int:
    """Of 2**exponent zero bytes, by doubling one byte."""
    crc = bitwise(bytes(1))
    for k in range(exponent):
        crc = _native.crc32c_combine(crc, crc, 1 << k)
    return crc
