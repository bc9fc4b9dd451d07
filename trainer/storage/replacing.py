"""Small files that a reader finds as they were or as they are to be, and names that are on the disk."""

import os
import pathlib


def replace(path: pathlib.Path, content: str | bytes, wait: bool = True) -> None:
    """Writes a small file so that a reader sees the old one or the new one, never a part.

    Args:
      path: the file.
      content: what it is to hold; text in UTF-8, what of it was no text as the bytes it was.
      wait: until it is on the disk; otherwise a power failure may leave neither.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
            file.flush()
            if wait:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_directory(path: pathlib.Path) -> None:
    """Names that were given or taken in it are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
