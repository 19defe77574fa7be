"""The first bytes of an .idx file, as Megatron writes them; read without numpy, which a submitting machine may lack."""

from __future__ import annotations

import struct

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version 1, dtype code, sequences, document bounds


def num_sequences(content: bytes) -> int | None:
    """Return how many sequences the index that begins with `content` describes; None: it is none of Megatron's."""
    if len(content) < HEADER.size:
        return None
    magic, _, _, sequences, _ = HEADER.unpack(content[: HEADER.size])
    return int(sequences) if magic == MAGIC else None
