"""Errors for people, and the exit codes by which scripts tell them apart."""

import re

OK = 0
USER_ERROR = 2
PREEMPTED = 75  # told to stop; state saved; start again to continue
PEER_LOST = 69  # another process of the run failed or went away; start again to continue
HUNG = 70  # nothing moved for too long; start again to continue
DIVERGED = 71  # copies of the variables that must be one are not; start again from the last checkpoint
STORAGE = 73  # the run directory can't be written
BUSY = 76  # another process owns the run directory


class UserError(Exception):
    """A mistake in what the user gave, told as flag, value, reason and fix.

    Args:
      flag: name of the flag (without dashes) whose value is at fault.
      value: that value, as given.
      reason: why it can't be used.
      fix: what to do instead.
      exit_code: the process's exit status.
    """

    def __init__(self, flag: str, value: object, reason: str, fix: str, exit_code: int = USER_ERROR) -> None:
        name = flag if flag[:1].isupper() else f"--{flag}"  # TF_CONFIG is no flag
        super().__init__(f"{name}={value}: {reason}\n  Fix: {fix}")
        self.exit_code = exit_code


def out_of_memory(error: BaseException) -> str:
    """What a backend says of its devices' memory where that did not suffice, on one line; '' of any other error."""
    exhausted = type(error).__name__ == "ResourceExhaustedError" or "RESOURCE_EXHAUSTED" in str(error)
    found = re.search(r"(?:OOM when|(?:[Rr]an )?[Oo]ut of memory)[^\n]*", str(error))
    return found[0].rstrip(".") if exhausted and found else ""


def as_raised(error: BaseException) -> BaseException:
    """An error of JAX's that Keras has lost: with words of its own, it can't raise anew what is made of a tracer."""
    while isinstance(error, AttributeError) and "no attribute '_error_repr'" in str(error) and error.__context__:
        error = error.__context__
    return error


def said_by_keras(error: BaseException) -> str:
    """What Keras says of an error, without colours and the arguments that it adds below."""
    return re.sub(r"\x1b\[\d*m", "", str(as_raised(error))).partition("\n\nArguments received by")[0].strip()


def last_words(said: str) -> str:
    """What ended a process, of all that it said: the error, without what Keras or a launcher adds below it."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", said).splitlines() if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if found := re.match(
            r"(?:\[\d+\] )?(?:onecurve: (?P<user>.*)|(?P<bug>[\w.]+(?:Error|Exception)\b.*))", lines[i]
        ):
            keras = "Exception encountered when calling" in lines[i]  # and the next line says which
            return found["user"] or " ".join([found["bug"], *lines[i + 1 : i + 2][:keras]])
    return lines[-1] if lines else "no word"
