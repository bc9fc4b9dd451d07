"""Data on another machine, by a real server: copied once, again where they changed, never half."""

import functools
import http.server
import pathlib
import subprocess
import sys
import threading

import pytest

from input_pipeline import remote
from input_pipeline.source import DataError
from tests.running import REPOSITORY, environment, summary, trainer


@pytest.fixture
def server(tmp_path):
    """(its URL, the directory that it serves)."""
    directory = tmp_path / "served"
    directory.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", directory
        httpd.shutdown()


def test_remote_data_are_copied_once(server, tmp_path, monkeypatch, capfd):
    url, directory = server
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(3):
        (directory / "deep").mkdir(exist_ok=True)
        (directory / "deep" / f"{number}.txt").write_text(str(number) * 5000)
    copy = pathlib.Path(remote.local(f"{url}/"))
    assert "copying 3 of 3" in capfd.readouterr().out
    assert {p.name: p.read_text() for p in copy.glob("deep/*.txt")} == {f"{n}.txt": str(n) * 5000 for n in range(3)}
    assert remote.local(f"{url}/") == str(copy) and "copying" not in capfd.readouterr().out
    with open(copy / ".copied.jsonl", "r+") as known:  # a kill while it was written
        known.truncate(len(known.read()) - 5)
    remote.local(f"{url}/")
    assert "copying 1 of 3" in capfd.readouterr().out
    assert remote.local(f"{url}/") == str(copy) and "copying" not in capfd.readouterr().out
    (directory / "deep/1.txt").write_text("changed")
    (directory / "deep/2.txt").unlink()
    remote.local(f"{url}/")
    assert "copying 1 of 2" in capfd.readouterr().out
    assert sorted(p.name for p in copy.glob("deep/*")) == ["0.txt", "1.txt"]
    assert (copy / "deep/1.txt").read_text() == "changed"
    assert remote.local(str(tmp_path)) == str(tmp_path)


READS = "import sys; from input_pipeline import remote; print(remote.local(sys.argv[1]), flush=True); sys.stdin.read()"


def test_a_copy_that_is_read_is_not_changed(server, tmp_path, monkeypatch):
    url, directory = server
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (directory / "a.txt").write_text("as it was")
    command, pipe = [sys.executable, "-c", READS, url], subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdin=pipe, stdout=pipe, text=True) as reading:
        while "onecurve" not in (line := reading.stdout.readline()) or "copying" in line:
            assert line
        copy = pathlib.Path(line.strip())
        assert remote.local(url) == str(copy)
        (directory / "a.txt").write_text("another")
        with pytest.raises(DataError, match="which another process reads: wait for its end"):
            remote.local(url)
        assert (copy / "a.txt").read_text() == "as it was"
        reading.stdin.close()
    remote.local(url)
    assert (copy / "a.txt").read_text() == "another"


def test_remote_data_that_can_not_be_had(server):
    url, _ = server
    for place, words in (
        (f"{url}/nowhere/", "can't be listed|holds no files"),
        ("http://127.0.0.1:1/", "can't be listed"),
        ("s3://bucket/data", "onecurve\\[remote\\]|can't be listed"),
        ("nosuchstore://bucket", "onecurve\\[remote\\]|can't be listed"),
    ):
        with pytest.raises(DataError, match=words):
            remote.local(place)


def test_a_run_on_remote_data(server, tmp_path):
    url, directory = server
    for name in ("a", "b", "c"):
        (directory / f"{name}.py").write_text(f"print('{name}')\n" * 200)
    dataset = ("--dataset=text(context=16, held_out=3, evaluation_examples=8)", f"--data_dir={url}")
    flags = ("--model=transformer(width=8, depth=1, heads=2, groups=1, hidden=8)", "--steps=3", "--global_batch=4")
    trainer(*dataset, *flags, f"--run_dir={tmp_path}/run", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert summary(tmp_path / "run")["step"] == 3
