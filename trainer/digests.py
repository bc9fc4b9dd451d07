"""SHA-256 of what a checkpoint is made of, by all cores: hashing doesn't hold Python up."""

import concurrent.futures
import hashlib
import os
import pathlib
from typing import Any

import numpy as np

_BLOCK, _READ = 2**24, 2**20  # bytes


def of_array(values: np.ndarray) -> str:
    """Of an array's elements in C order, as hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def of_file(path: pathlib.Path) -> dict[str, Any]:
    """Its size, and the digest of the digests of its blocks of 16 MiB, which several cores make at once."""
    with open(path, "rb") as file, concurrent.futures.ThreadPoolExecutor() as threads:
        size = os.fstat(file.fileno()).st_size

        def of_block(start: int) -> bytes:
            digest, position, end = hashlib.sha256(), start, min(start + _BLOCK, size)
            while position < end and (part := os.pread(file.fileno(), min(_READ, end - position), position)):
                digest.update(part)
                position += len(part)  # a file system may give less than was asked for
            return digest.digest()

        blocks = b"".join(threads.map(of_block, range(0, size, _BLOCK)))
    return {"bytes": size, "sha256_of_blocks": hashlib.sha256(blocks).hexdigest()}
