"""The commands in the README and in docs/: each one's flags are right, and those in blocks of their own run."""

import re
import shlex
import subprocess
import sys

import pytest
from absl import flags

from tests.running import REPOSITORY, environment
from trainer.command_line import VERBS, define_flags, from_flags

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name not in ("performance.md", "decisions.md")]
# What a block's command needs that is not here: many hosts, a cluster to talk to, hours of computing.
ELSEWHERE = (
    "launch.slurm",
    "launch.kubernetes",
    "size='7B'",
    "my_model",
    "my_data",
    "my_strategy",
    "drill",
    "diff RUN_A",
)
SHORT = ("--steps=2", "--evaluate_every=never")


def commands(page, inline: bool) -> list[str]:
    """Commands of a page: lines of its blocks, and perhaps what stands in backticks."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
    if inline:
        found += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [
        match[1].strip() for line in found if (match := re.match(r"\$? ?(python -m (?:trainer|launch\.\w+).*)", line))
    ]


ALL = sorted({(page.name, command) for page in PAGES for command in commands(page, inline=True)})


@pytest.mark.parametrize(("page", "command"), ALL)
def test_the_flags_of_a_command_are_right(page, command):
    words = [word for word in shlex.split(command.partition(" | ")[0]) if "..." not in word]
    trainer_s = words[words.index("--") + 1 :] if "--" in words else words[3:] if words[2] == "trainer" else []
    trainer_s = [word for word in trainer_s if word not in ("--help",)]
    values = flags.FlagValues()
    define_flags(values)
    flags.DEFINE_multi_string("flagfile", [], "", flag_values=values)
    rest = values(["trainer", *trainer_s])[1:]
    from_flags(values)
    assert not rest or rest[0] in VERBS, f"{page}: there is no verb {rest[0]}"


RUN = sorted(
    {
        (page.name, command)
        for page in PAGES
        for command in commands(page, inline=False)
        if not any(word in command for word in (*ELSEWHERE, "..."))
    }
)


@pytest.mark.long
@pytest.mark.parametrize(("page", "command"), RUN)
def test_a_command_runs(page, command, tmp_path):
    words = shlex.split(command)
    verb = next((w for w in words[3:] if w in VERBS), "train")
    extra = [f"--run_dir={tmp_path / 'run'}", *(SHORT if verb == "train" else ())]
    if "--exact" in words or verb in ("verify", "explain"):
        extra = extra[:1]
    if verb in ("evaluate", "export", "report", "audit", "checkpoints"):
        first = [sys.executable, "-m", "trainer", *SHORT, f"--run_dir={tmp_path / 'run'}"]
        subprocess.run(first, check=True, env=environment(), cwd=REPOSITORY, capture_output=True, timeout=300)
        words = [word for word in words if not word.startswith("--run_dir")]
    done = subprocess.run(
        [sys.executable, *words[1:], *extra],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{page}: {command}\n{done.stdout}\n{done.stderr}"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", page.read_text()):
            path = page.parent / (target[0] or target[1])
            assert path.exists(), f"{page.name} points to {path}"
