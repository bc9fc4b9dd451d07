"""Holds back what a process says on stderr, and leaves out what is noise. It is run beside that process, by its path.

For a process that dies in C++, as XLA ends one for a flag that it does not know, or TensorFlow on an old processor,
would take what it said last with it.
"""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator

# Of TensorFlow's C++, which no setting of its own keeps from saying it.
_NOISE = re.compile(rb"[IW]\d{4} |E\d{4} .*cuInit|WARNING: All log messages before absl|\d{4}-\d\d-\d\d .*: [IW] ")
_WELL = b"\0\n"  # ends what was said, where all went well
_holding = False


@contextlib.contextmanager
def stderr_held_back() -> Iterator[None]:
    """Within it, what is said on stderr is held back; afterwards, noise is left out, or nothing after an exception."""
    global _holding
    import subprocess  # which the other process has no need of

    try:
        beside = subprocess.Popen([sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE)
    except OSError:  # people are told more than they need
        yield
        return
    assert beside.stdin
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(beside.stdin.fileno(), 2)
    _holding = True
    try:
        yield
        sys.stderr.flush()
        end_well()
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        _holding = False
        beside.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # another process has its stdin, too
            beside.wait(timeout=5)


def end_well() -> None:
    """Has noise left out of what is held back, if something is: also for a process that ends without an exception."""
    if _holding:
        with contextlib.suppress(OSError):
            os.write(2, _WELL)


def left(lines: Iterable[bytes]) -> list[bytes]:
    """What of lines is no noise, if they end well; else all of them."""
    held = list[bytes]()
    for line in lines:
        if line.endswith(_WELL):
            held.append(line.removesuffix(_WELL))
            return [line for line in held if not _NOISE.match(line)]
        held.append(line)
    return held


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the other
    sys.stderr.buffer.write(b"".join(left(sys.stdin.buffer)))
