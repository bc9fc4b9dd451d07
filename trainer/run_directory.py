"""The run directory: who owns it, which run it holds, and where its files are."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from trainer.config import Config
from trainer.errors import BUSY, STORAGE, USER_ERROR, UserError
from trainer.storage.lock import Lock
from trainer.storage.replacing import replace

_FULL = (errno.ENOSPC, errno.EDQUOT)


def split(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path | None]:
    """The run directory, and the checkpoint in it, of a path to either."""
    is_checkpoint = path.parent.name == "checkpoints" and path.name.isdigit()
    return (path.parent.parent, path) if is_checkpoint else (path, None)


class RunDirectory:
    """Exclusive owner of a run directory, for the length of a `with` block.

    `checkpoint` is the one of the run that --run_dir names, or None: to evaluate and to export.

    Args:
      config: names it.
      owner: whether this process writes it; the others of a cluster only read.

    Raises:
      UserError: on entering: not writable, in use by another process, or another run's; on leaving: it was full, or
        gone, when something was to be written that a run can't be without.
    """

    def __init__(self, config: Config, owner: bool = True) -> None:
        self._owner = owner
        self.path, self.checkpoint = split(config.directory())
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard, self.starts = self.path / "tensorboard", self.path / "starts"
        self.metrics, self.summary = self.path / "metrics.jsonl", self.path / "summary.json"
        self.deadline, self.exports = self.path / "deadline", self.path / "export"
        self._config, self._definition = config, self.path / "definition.json"
        self._lock = Lock(self.path / "lock")
        self._facts: dict[str, Any] = {}  # of what was admitted

    def __enter__(self) -> Self:
        if self.checkpoint:
            raise UserError(
                "run_dir",
                self.checkpoint,
                f"is a checkpoint of the run {self.path}",
                "give the run to continue it; a new one starts from a checkpoint's variables by --initialize_from",
            )
        if not self._owner:
            return self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if holder := self._lock.acquire():
                raise UserError(
                    "run_dir",
                    self.path,
                    f"is in use by {holder}",
                    "wait for it, stop it, or give another --run_dir",
                    exit_code=BUSY,
                )
            for folder in (self.checkpoints, self.starts, self.tensorboard):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            self._lock.release()
            raise self._can_t_be_written(error) from None
        except UserError:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        if isinstance(error, OSError) and self._is_ours(error):
            raise UserError(
                "run_dir",
                self.path,
                f"can't be used any more: {error}; checkpoints that are in it are whole",
                "make room, put back what was moved or deleted, or drop os.chdir(); then the same command continues it",
                STORAGE,
            ) from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Within it a verb writes that does not own the directory; that it can't is told as a mistake."""
        try:
            yield
        except OSError as error:
            raise self._can_t_be_written(error) from error

    def _can_t_be_written(self, error: OSError) -> UserError:
        full = error.errno in _FULL
        return UserError(
            "run_dir",
            self.path,
            f"can't be written by user {os.getuid()}: {os.strerror(error.errno) if error.errno else error} "
            f"({error.filename or self.path})",
            "make room, or give another directory" if full else "give a directory that you may write",
            STORAGE if full else USER_ERROR,
        )

    def _is_ours(self, error: OSError) -> bool:
        """Whether an error is of this directory; one of a full disk names no file, and others' are told as theirs."""
        if error.filename is None:
            return error.errno in _FULL
        return pathlib.Path(os.fsdecode(error.filename)).absolute().is_relative_to(self.path.absolute())

    def is_in_use(self) -> bool:
        """Whether a run goes on in it, as far as this host's kernel knows."""
        return self._lock.is_held()

    def definition(self) -> dict[str, Any] | None:
        """What definition.json says the run is, or None in a new directory."""
        try:
            return dict(json.loads(self._definition.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise UserError(
                "run_dir",
                self.path,
                f"its {self._definition.name} is damaged: {error}",
                "put back a copy; or delete it, and the flags given now are taken for the run's",
            ) from None

    def check_flags(self) -> int:
        """Compares the flags with the run that is here.

        Returns:
          The run's number of logical replicas; 0 in a new directory, or where nothing was trained by other flags.

        Raises:
          UserError: the directory holds another run; each difference is named.
        """
        recorded = self.definition()
        if recorded is None:
            return 0
        given, known = self._config.definition(), dict(recorded["flags"])
        given["model"] = known["model"]  # `check` compares what the model comes to, not how it is spelt
        if not self._config.replicas:
            given["replicas"] = known["replicas"]
        differing = [k for k in known.keys() | given.keys() if known.get(k) != given.get(k)]
        if differing and self._begins_anew():
            return 0
        if differing:
            table = "".join(f"\n    --{k}: {known.get(k)} there, {given.get(k)} now" for k in sorted(differing))
            raise UserError(
                "run_dir",
                self.path,
                f"holds another run:{table}",
                "give another --run_dir for a new run, or these flags as they are there to continue",
            )
        return int(known["replicas"])

    def check(self, facts: dict[str, Any]) -> None:
        """Raises UserError where facts are not those that `record` has written: what differs is named."""
        known = self.definition()
        if known is None:
            return
        for fact, now in facts.items():
            flag = "dataset" if fact == "data" else "model"
            _compare(flag, getattr(self._config, flag), self.path, known.get(fact), now)

    def admit(self, facts: dict[str, Any]) -> None:
        """As `check`, before a start trains; where nothing was trained yet, the directory is a new one again.

        Args:
          facts: what the flags came to: 'variables' (path -> [shape, dtype]), 'data' and the like.
        """
        self._facts = facts
        if self._owner:
            try:
                self.check(facts)
            except UserError:
                if not self._begins_anew():
                    raise

    def _begins_anew(self) -> bool:
        """Whether no step is kept here, or told of: what was refused so far may be mended. What it left is removed."""
        kept = {path.name for path in self.checkpoints.glob("[!.]*")} - {f"{0:08d}"}
        if kept or (self.metrics.exists() and self.metrics.stat().st_size):
            return False
        if self._owner:
            print(f"run_dir  {self.path}: nothing was trained there yet; begun anew, as it is given now", flush=True)
            for folder in (self.checkpoints, self.starts, self.tensorboard):
                for path in folder.iterdir():  # the folder stays: it may be a link to another disk
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self._definition.unlink()
        return True

    def check_is_vacant(self) -> None:
        """Raises UserError where a run that begins would replace what one has left whose checkpoints are gone."""
        for path in (self.metrics, self.summary):
            if path.exists() and path.stat().st_size:
                raise UserError(
                    "run_dir",
                    self.path,
                    f"has no checkpoint to continue from, and {path.name}, which a run that begins there would replace",
                    "put the checkpoints back, move that file away, or give another --run_dir",
                )

    def record(self, replicas: int, class_names: Sequence[str] | None) -> None:
        """Writes run.flags, and a new run's definition.json, with its V: from here on the directory is no other's.

        The names of its classes are there for `evaluate`, whose data may be others.
        """
        if not self._owner:
            return
        if self.definition() is None:
            flags = self._config.definition() | {"replicas": replicas}
            known = {"flags": flags, "class_names": class_names, **self._facts}
            replace(self._definition, json.dumps(known, indent=1, sort_keys=True))
        # The newest start's flags, for where it runs and how long may change; of the bytes that the command line had.
        replace(self.path / "run.flags", os.fsencode("".join(f"{line}\n" for line in self._config.to_flags())))


def _compare(flag: str, value: str, path: pathlib.Path, known: Any, now: Any) -> None:
    now = json.loads(json.dumps(now))
    if known == now:
        return
    if isinstance(known, dict) and isinstance(now, dict):
        differing = sorted(k for k in known.keys() | now.keys() if known.get(k) != now.get(k))
        # The optimizer's variables follow the model's: told only if nothing else differs.
        differing = [k for k in differing if not k.startswith("optimizer/")] or differing
        lines = [f"\n    {k}: {known.get(k, 'absent')} there, {now.get(k, 'absent')} now" for k in differing]
        more = [f"\n    and {len(lines) - 12} more"] if len(lines) > 12 else []
        table = ":" + "".join(lines[:12] + more)
    else:
        table = f" ({known} there, {now} now)"
    raise UserError(
        flag,
        value,
        f"is not what the run in {path} was started with{table}",
        "take the change back, or give another --run_dir; --initialize_from starts a new run from this one's variables",
    )
