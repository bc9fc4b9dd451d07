"""Runs the trainer as a Slurm job: writes an sbatch script from the run's own flags and submits it.

python -m launch.slurm --nodes=2 --time=8:00:00 [--gpus_per_task=1] [--dry_run] -- --strategy=device_mesh ...

Each task is a process of the run; they find each other by what srun tells them. Ahead of the time limit, and when
a more urgent job needs the nodes, Slurm sends SIGTERM: the run saves, leaves with 75, and is queued again, to
continue at that very step. --run_dir must lie on a file system that the nodes share.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from launch import flags_of, told
from trainer.command_line import config_of

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks_per_node}
#SBATCH --distribution=block
#SBATCH --time={time}
#SBATCH --signal=TERM@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
{options}# By: {command}

cd {directory} || exit 2
unset PYTHONDONTWRITEBYTECODE  # without bytecode, TensorFlow takes three times as long to import
trap : TERM  # this shell stays, to queue the job again once its tasks have saved

# A task that ends does not take the others with it: they end by themselves, and the chief may be saving.
srun {cores}--kill-on-bad-exit=0 --wait=60 --label {python} -m trainer {flags}
code=$?

# 0: done. 2, 76: another start would meet the same. 75: told to stop, and saved. All else: something was
# lost on the way, which counts as a restart.
again=no
case $code in
  0 | 2 | 76) ;;
  75) again=yes ;;
  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ] && again=yes ;;
esac
echo "exit code $code after start $((${{SLURM_RESTART_COUNT:-0}} + 1)); again: $again"
if [ $again = yes ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # until Slurm ends this shell
fi
exit $code
"""


def main(argv: Sequence[str]) -> int:
    """Submits the job, or prints its script. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch.slurm", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=_positive, default=1, help="number of nodes")
    parser.add_argument(
        "--tasks_per_node", type=_positive, default=1, help="processes on each; with GPUs, one for each"
    )
    parser.add_argument("--gpus_per_task", type=int, default=0, help="GPUs of a process, which takes no others")
    parser.add_argument("--cpus_per_task", type=int, default=0, help="cores of a process; 0: the partition's default")
    parser.add_argument("--time", default="24:00:00", help="time limit of a start; the run may take many")
    parser.add_argument(
        "--grace", type=_positive, default=120, help="seconds before the limit at which it is told to save"
    )
    parser.add_argument(
        "--restarts", type=int, default=5, help="starts after a lost process or node; preemptions don't count"
    )
    parser.add_argument("--partition", default="", help="partition")
    parser.add_argument("--account", default="", help="account")
    parser.add_argument("--name", default="onecurve", help="name of the job")
    parser.add_argument("--output", default="slurm-%j.log", help="log, to which each start appends")
    parser.add_argument("--dry_run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- and the flags of python -m trainer")
    arguments = parser.parse_args(argv)
    flags = flags_of(arguments.flags)
    config_of(flags)  # a mistake in them is told before a job that can't run has waited for its turn
    script = render(arguments, flags, ["python", "-m", "launch.slurm", *argv])
    if arguments.dry_run:
        print(script, end="")
        return 0
    try:
        return subprocess.run(["sbatch"], input=script, text=True, check=False).returncode
    except FileNotFoundError:
        print("launch.slurm: there is no sbatch on this machine; --dry_run prints the script", file=sys.stderr)
        return 2


def render(arguments: argparse.Namespace, flags: Sequence[str], command: Sequence[str]) -> str:
    """The sbatch script of a job."""
    options = {
        # Not to a task, which Slurm would bind to them: NVIDIA's ways between GPUs need each process to reach all.
        "gpus-per-node": arguments.gpus_per_task * arguments.tasks_per_node,
        "cpus-per-task": arguments.cpus_per_task,
        "partition": arguments.partition,
        "account": arguments.account,
    }
    return SCRIPT.format(
        **{k: v for k, v in vars(arguments).items() if k != "flags"},
        options="".join(f"#SBATCH --{name}={value}\n" for name, value in options.items() if value),
        # Since Slurm 22.05 srun does not take this from the job.
        cores=f"--cpus-per-task={arguments.cpus_per_task} " if arguments.cpus_per_task else "",
        command=shlex.join(command),
        directory=shlex.quote(str(pathlib.Path.cwd())),
        python=shlex.quote(sys.executable),
        flags=shlex.join(flags),
    )


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


if __name__ == "__main__":
    sys.exit(told(main, sys.argv[1:]))
