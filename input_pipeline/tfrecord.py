"""TFRecord files as one sequence of records, by an index of where each is."""

import fcntl
import functools
import json
import os
import pathlib
import resource
import struct
import time
from collections.abc import Callable, Sequence

import google_crc32c
import numpy as np
import numpy.typing as npt

from input_pipeline import lengthy
from input_pipeline.host_cache import state
from input_pipeline.source import DataError

_COMPRESSED = b"\x1f\x8b", b"\x78\x9c"  # how gzip's and zlib's files begin
_FRAME = struct.Struct("<QI")  # length of the record, and the masked checksum of the length
_SUM = struct.Struct("<I")  # masked checksum of the record, after it
_LOOK = 0.2  # seconds between two looks for what another process has made
# Of a file: int64 (records, 2), offset and bytes of each whole record; and the damaged ones, in words.
_Index = tuple[npt.NDArray[np.int64], list[str]]


class Records:
    """The records of some files, in the order of the files.

    Args:
      paths: the files.
      skip_bad: how many damaged records may be left out; one more, and it is an error.

    Raises:
      DataError: damaged records, each with its file and offset; also on reading.
    """

    def __init__(self, paths: Sequence[pathlib.Path], skip_bad: int = 0) -> None:
        indices = _indices(paths)
        bad = [words for _, damaged in indices for words in damaged]
        if len(bad) > skip_bad:
            raise DataError(
                f"{len(bad)} damaged records, and {skip_bad} may be left out (skip_bad): " + "; ".join(bad[:5])
            )
        if bad:
            print(f"{len(bad)} damaged records are left out: " + "; ".join(bad[:5]), flush=True)
        tables = [np.column_stack([np.full(len(found), i), found]) for i, (found, _) in enumerate(indices)]
        self._table, self._paths = np.concatenate(tables), paths  # int64 (records, 3): file, offset, bytes
        self._reader = object()

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> bytes:
        number, offset, size = self._table[index].tolist()
        data = os.pread(_opened(self._paths[number], self._reader), size + _SUM.size, offset)
        if data[size:] != _SUM.pack(_masked(data[:size])):  # where the index is older than the damage
            place = f"{self._paths[number]} at byte {offset - _FRAME.size}"
            raise DataError(f"{place}: a record that is not what it was; copy the file anew")
        return data[:size]


@functools.lru_cache(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # each holds a descriptor
def _opened(path: pathlib.Path, reader: object) -> "_Descriptor":
    """Each reader's own, for by the time of a later one the path may be another file's."""
    return _Descriptor(os.open(path, os.O_RDONLY))


class _Descriptor(int):
    """That of a file, which is closed once nobody reads it any more."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self)


def _indices(paths: Sequence[pathlib.Path]) -> list[_Index]:
    """Those of all files. Of several processes of this host each makes some, where the others can read them."""
    found, begin = dict[pathlib.Path, _Index](), time.monotonic()
    while left := [path for path in paths if path not in found]:
        for path in left:
            index = _kept(path) or _made(path)
            if index is not None:
                found[path] = index
        if not found.keys() & set(left):
            # The other tells how far it is, or is taken for hung itself.
            waited = time.monotonic() - begin
            lengthy.tell(f"looking through {left[0]}, by another process of this host ({waited:.0f} s)")
            time.sleep(_LOOK)
    return [found[path] for path in paths]


def _kept(path: pathlib.Path) -> _Index | None:
    """A file's index, if it was made, and the file is as it was: a line of JSON, and then the records' places."""
    try:
        head, _, table = _beside(path).read_bytes().partition(b"\n")
        known, records = json.loads(head), np.frombuffer(table, "<i8").reshape(-1, 2)
        if known["state"] == state(path) and known["records"] == len(records):
            return records, known["bad"]
    except (OSError, ValueError, KeyError):
        pass
    return None


def _made(path: pathlib.Path) -> _Index | None:
    """A file's index, kept beside it; None while another process makes it."""
    with open(path, "rb") as file:
        if os.access(path.parent, os.W_OK):  # or the other would make it for itself alone
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError:
                pass  # a file system without locks
            if (index := _kept(path)) is not None:
                return index
        before, (found, damaged) = state(path), scan(path)
        records = np.array(found, "<i8").reshape(-1, 2)
        head = json.dumps({"state": before, "records": len(records), "bad": damaged})
        try:
            temporary = path.with_name(f"{_beside(path).name}.part")
            temporary.write_bytes(head.encode() + b"\n" + records.tobytes())
            temporary.replace(_beside(path))
        except OSError:
            pass  # a directory that may not be written: the next start scans again
    return records, damaged


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.index")


def scan(path: pathlib.Path) -> tuple[list[tuple[int, int]], list[str]]:
    """Reads a file once, checking all its sums. Returns the whole records, and the damaged ones in words."""
    found: list[tuple[int, int]] = []
    damaged: list[str] = []
    offset, end = 0, path.stat().st_size
    with open(path, "rb") as file:
        while offset < end:
            lengthy.tell(f"looking through {path}: {offset >> 20:,} of {end >> 20:,} MiB")
            frame = file.read(_FRAME.size)
            if len(frame) < _FRAME.size:
                damaged.append(f"{path} ends in the middle of a record at byte {offset}")
                break
            size, check = _FRAME.unpack(frame)
            if _masked(frame[:8]) != check:
                if not offset and frame.startswith(_COMPRESSED):
                    raise DataError(f"{path} is compressed, and a record can't be read by its place: decompress it")
                damaged.append(f"{path} at byte {offset}: a damaged length; what follows can't be found")
                break
            if offset + _FRAME.size + size + _SUM.size > end:
                damaged.append(f"{path} ends in the middle of a record at byte {offset}")
                break
            data = file.read(size)
            if _masked(data) == _SUM.unpack(file.read(_SUM.size))[0]:
                found.append((offset + _FRAME.size, size))
            else:
                damaged.append(f"{path} at byte {offset}: a damaged record")
            offset += _FRAME.size + size + _SUM.size
    return found, damaged


def framed(record: bytes) -> bytes:
    """A record as a TFRecord file has it: its length and itself, each with its checksum."""
    length = struct.pack("<Q", len(record))
    return length + _SUM.pack(_masked(length)) + record + _SUM.pack(_masked(record))


def _masked(data: bytes) -> int:
    """The checksum of a TFRecord: CRC-32C, rotated and moved (tensorflow/core/lib/hash/crc32c.h)."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
