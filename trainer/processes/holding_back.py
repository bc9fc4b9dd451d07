"""Holds back what a process says on stderr, and leaves out what is noise. It is run beside that process, by its path.

For a process that dies in C++, as XLA ends one for a flag that it does not know, or TensorFlow on an old processor,
would take what it said last with it.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterable

# Of TensorFlow's C++, which no setting of its own keeps from saying it.
_NOISE = re.compile(rb"[IW]\d{4} |E\d{4} .*cuInit|WARNING: All log messages before absl|\d{4}-\d\d-\d\d .*: [IW] ")
WELL = b"\0\n"  # ends what was said, where all went well


def start() -> "subprocess.Popen[bytes]":
    """Starts it; what is written to its stdin is held back until that is closed, or WELL is said.

    Raises:
      OSError: no process can be started.
    """
    return subprocess.Popen([sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE)


def left(lines: Iterable[bytes]) -> list[bytes]:
    """What of lines up to WELL is no noise; all of them, where that does not come."""
    held = list[bytes]()
    for line in lines:
        if line.endswith(WELL):
            held.append(line.removesuffix(WELL))
            return [line for line in held if not _NOISE.match(line)]
        held.append(line)
    return held


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the other
    sys.stderr.buffer.write(b"".join(left(sys.stdin.buffer)))
