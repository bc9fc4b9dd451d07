"""Data in a bucket (gs://, s3://) or on a web server (https://): copied to this host once, by fsspec.

Sources read examples in any order, map files into memory and keep an index beside them; so they work on files.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TextIO

from input_pipeline import host_cache, lengthy
from input_pipeline.source import DataError

_AT_ONCE = 8  # files
_LOOK = 5.0  # seconds between two looks at how far the copies are
_KNOWN = ".copied.jsonl"
_used: dict[pathlib.Path, int] = {}  # copies that this process reads, and the files by whose locks others know
# By what stores call it: how a file is known to be another than before.
_STAMPS = (
    "size",
    "ETag",
    "etag",
    "md5Hash",
    "crc32c",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
)


def local(place: str) -> str:
    """The directory on this host that holds a copy of a remote one; what names no remote place comes back as it is.

    Copies lie under $XDG_CACHE_HOME/onecurve. Files that are there, and have not changed in the store since (by what
    it tells of them: size, time, checksum), are not fetched again; one process of a host fetches, the others wait. A
    copy that a process reads is not changed until it ends.

    Args:
      place: a directory, or a URL of one.

    Raises:
      DataError: the store can't be reached or has no such files, the packages for it are missing, a file's name would
        lead out of the copy, or other files are there than in a copy that is read.
    """
    if not re.match(r"[a-z][a-z0-9+]*://", place):
        return place
    try:
        import fsspec

        store, root = fsspec.core.url_to_fs(place)
        found = store.find(root, detail=True)
        if not found:
            store.ls(root)  # which raises what `find` keeps to itself
    except ImportError as error:
        raise DataError(f"to read {place}: pip install 'onecurve[remote]' ({error})") from None
    except Exception as error:  # each store has errors of its own
        raise DataError(f"{place} can't be listed: {type(error).__name__}: {error}") from error
    files = {name: facts for name, facts in found.items() if facts.get("type", "file") == "file"}
    if not files:
        raise DataError(f"{place} holds no files")
    directory = host_cache.directory() / hashlib.sha256(place.rstrip("/").encode()).hexdigest()[:16]
    with lengthy.alone(directory.with_suffix(".lock"), lambda: f"copying {place}: {_copied(directory)}"):
        directory.mkdir(exist_ok=True)
        if directory not in _used:
            _used[directory] = os.open(directory / ".used", os.O_RDWR | os.O_CREAT, 0o644)
        _fetch(store, root.rstrip("/"), files, directory, place)
        fcntl.flock(_used[directory], fcntl.LOCK_SH)
    return str(directory)


def _forget() -> None:
    while _used:
        os.close(_used.popitem()[1])


os.register_at_fork(after_in_child=_forget)  # or a fork that lives on would keep its parent's locks


def localized(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a dataset's load, of which `data_dir` may be a URL."""
    place = arguments.get("data_dir")
    return {**arguments, "data_dir": local(place)} if isinstance(place, str) else dict(arguments)


def _copied(directory: pathlib.Path) -> str:
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # it has just got its name
            size += path.stat().st_size
    return f"{size >> 20:,} MiB are here"


def _known(file: TextIO) -> dict[str, Any]:
    """File -> stamp, of the copies that were made. A last line that a kill has cut off is dropped: it is made again."""
    file.seek(0)
    lines = file.readlines()
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        file.truncate(sum(len(line.encode()) for line in lines))
    found = map(json.loads, lines)
    return {line["file"]: line["stamp"] for line in found}


def _fetch(store: Any, root: str, files: dict[str, Any], directory: pathlib.Path, place: str) -> None:
    """Makes the directory a copy: each file fetched beside, then renamed; what is no longer there is removed."""
    wanted = {}
    for name, facts in files.items():
        relative = name.removeprefix(root).lstrip("/") or pathlib.PurePosixPath(name).name
        if not (directory / relative).resolve().is_relative_to(directory.resolve()):
            raise DataError(f"{place} names a file {relative!r}, which would lie outside of its copy")
        if facts.get("size") is None:
            facts = store.info(name)
        wanted[relative] = name, {key: str(facts[key]) for key in _STAMPS if key in facts}
    with open(directory / _KNOWN, "a+") as known_file:
        known = _known(known_file)
        if any(stamp != wanted.get(relative, ("", None))[1] for relative, stamp in known.items()):
            try:
                fcntl.flock(_used[directory], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"{place} holds other files than were copied to {directory}, which another process reads: "
                    "wait for its end, or set XDG_CACHE_HOME to another directory"
                ) from None
        for relative in set(known) - set(wanted):
            (directory / relative).unlink(missing_ok=True)
        new = [r for r, (_, stamp) in wanted.items() if known.get(r) != stamp or not (directory / r).is_file()]
        if new:
            print(f"copying {len(new)} of {len(wanted)} files from {place} to {directory}", flush=True)

        def fetch(relative: str) -> None:
            target = directory / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            part = directory / f".part-{hashlib.sha256(relative.encode()).hexdigest()[:16]}"
            store.get_file(wanted[relative][0], str(part))
            os.replace(part, target)

        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            for relative, fetched in [(relative, pool.submit(fetch, relative)) for relative in new]:
                while not wait([fetched], _LOOK).done:
                    lengthy.tell(f"copying {place}: {_copied(directory)}")
                fetched.result()
                known_file.write(json.dumps({"file": relative, "stamp": wanted[relative][1]}) + "\n")
        except Exception as error:
            raise DataError(f"{place} could not be copied: {type(error).__name__}: {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)
