"""Text as tokens, of tokenizers that the tests make."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from input_pipeline import lengthy, mixture, text
from input_pipeline.source import DataError
from tests.running import environment, summary, trainer
from trainer import loading


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    return place / "onecurve"


def test_tokens_of_a_sentencepiece_model(tmp_path):
    import sentencepiece

    files = [tmp_path / f"{name}.txt" for name in "abcd"]
    for number, file in enumerate(files):
        file.write_text(f"one curve on any hardware, through any failure, said {number} times.\n" * 200)
    given = ",".join(map(str, files))
    sentencepiece.SentencePieceTrainer.train(input=given, model_prefix=tmp_path / "small", vocab_size=32)
    loaded = text.load(str(tmp_path), "*.txt", context=16, held_out=4, tokenizer=str(tmp_path / "small.model"))
    assert loaded.classes == 32 and loaded.evaluation
    x, y = loaded.train.read(np.arange(len(loaded.train)))
    assert (x.ravel()[1:] == y.ravel()[:-1]).all() and x.dtype == np.int32 and x.max() < 32
    assert loaded.decode and "through any failure" in loaded.decode(x.ravel())
    assert "said 1" in loaded.decode(x.ravel()) and "said 0" not in loaded.decode(x.ravel())  # which is held out
    (tmp_path / "empty").write_text("")
    sentencepiece.SentencePieceTrainer.train(input=given, model_prefix=tmp_path / "endless", vocab_size=32, eos_id=-1)
    with pytest.raises(DataError, match="fewer tokens than context=16"):  # it has none at all
        text.load(str(tmp_path / "empty"), context=16, tokenizer=str(tmp_path / "endless.model"))
    with pytest.raises(DataError, match="no model of SentencePiece"):
        text.load(str(tmp_path), "*.txt", tokenizer=str(files[0]))

    def mixed(*models):
        pairs = zip(files, models, strict=False)
        parts = [f"text(data_dir='{file}',context=16,tokenizer='{tmp_path / model}.model')" for file, model in pairs]
        return mixture.load(dict.fromkeys(parts, 1), loading.loaded)

    both = mixed("small", "small")
    assert both.classes == 32 and "through any failure" in both.decode(both.train.read(np.arange(8))[0].ravel())
    upper = tmp_path / "upper.txt"
    upper.write_text("".join(file.read_text().upper() for file in files))
    sentencepiece.SentencePieceTrainer.train(input=str(upper), model_prefix=tmp_path / "other", vocab_size=32)
    with pytest.raises(DataError, match="give all the same tokenizer"):
        mixed("small", "other")


LOAD = """
import os
import signal
import sys
import time

from input_pipeline import lengthy, text, token_file

token_file._SAVE_EVERY = 0.0
directory, at = sys.argv[1:]


def listener(words):
    print(words, flush=True)
    while at == "wait" and not os.path.exists("go"):
        time.sleep(0.01)
    if words.endswith(f" {at} of 7 MiB"):
        os.kill(os.getpid(), signal.SIGKILL)


lengthy.listener = listener
print(len(text.load(directory, "a.txt", context=16, tokenizer="small.model").train))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A directory with a text of 8 MB, and a tokenizer of it."""
    import sentencepiece

    directory = tmp_path_factory.mktemp("corpus")
    lines = [f"said {number} times: one cürve on any hardware, through any failure.\n" for number in range(120_000)]
    (directory / "a.txt").write_text("".join(lines))
    (directory / "b.txt").write_text("".join(lines[:100]))
    given = str(directory / "b.txt")
    sentencepiece.SentencePieceTrainer.train(input=given, model_prefix=directory / "small", vocab_size=48)
    return directory


def load(corpus):
    loaded = text.load(str(corpus), "a.txt", context=16, tokenizer=str(corpus / "small.model"))
    return loaded.train.read(np.arange(len(loaded.train)))[0].ravel()


def test_tokens_are_made_once(corpus, cache):
    """And kept for later starts, until the texts are others; of a large file in parts."""
    import sentencepiece

    whole = load(corpus)
    (file,) = cache.glob("*.tokens")
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".tokens"]
    assert file.stat().st_size < 2.1 * len(whole) * 20 / 19  # one in 20 is held out
    model = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "small.model"))
    text_of_it = (corpus / "a.txt").read_text()
    assert model.decode(whole.tolist()) in text_of_it.replace("\n", " ")
    end = text_of_it.index("\n", 2**20) + 1  # the first part
    assert model.encode(text_of_it[:end]) == whole[: len(model.encode(text_of_it[:end]))].tolist()
    made = file.stat().st_mtime_ns
    assert (load(corpus) == whole).all() and file.stat().st_mtime_ns == made
    with open(file, "r+b") as damaged:
        damaged.seek(1_000_000)
        damaged.write(b"onecurve")
    with pytest.raises(DataError, match=r"\.tokens is damaged: what it keeps of tokens 0 to 524,287 is not"):
        load(corpus)
    os.utime(corpus / "a.txt")
    assert (load(corpus) == whole).all() and file.stat().st_mtime_ns > made


def test_tokens_of_a_killed_start_are_gone_on_with(corpus, cache, monkeypatch, tmp_path):
    killed = subprocess.run([sys.executable, "-c", LOAD, str(corpus), "4"], env=environment(), cwd=corpus)
    assert killed.returncode == -signal.SIGKILL
    told = list[str]()
    monkeypatch.setattr(lengthy, "listener", told.append)
    going_on = load(corpus)
    assert int(told[0].removeprefix("making tokens of text: ").split()[0]) >= 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (load(corpus) == going_on).all()


def test_tokens_are_made_by_one_process_of_a_host(corpus, cache):
    go = corpus / "go"
    go.unlink(missing_ok=True)
    command = [sys.executable, "-c", LOAD, str(corpus), "wait"]
    start = dict(env=environment(), cwd=corpus, stdout=subprocess.PIPE, text=True)
    first = subprocess.Popen(command, **start)
    while not list(cache.glob("*.part")):
        time.sleep(0.01)
    second = subprocess.Popen(command, **start)
    waits = second.stdout.readline()
    go.touch()
    (*made, length), (*_, same) = (process.communicate(timeout=120)[0].splitlines() for process in (first, second))
    assert waits == "making tokens of text: 0 MiB are made, by another process of this host\n"
    assert "making tokens of text: 7 of 7 MiB" in made and length == same


def test_documents(tmp_path):
    """Lines of JSON, rows of CSV and Parquet, and compressed files are what they stand for, as bytes or as tokens."""
    import pyarrow
    import pyarrow.parquet
    import sentencepiece

    said = [f"one cürve on any hardware,\nsaid {number} times" for number in range(300)]
    joined = "\0".join(said) + "\0"
    lines = "\n".join(json.dumps({"id": number, "text": each}) for number, each in enumerate(said))
    (tmp_path / "a.jsonl").write_text(f"\ufeff{lines}")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(f"{lines}\n\n".encode()))
    (tmp_path / "a.jsonl.zst").write_bytes(pyarrow.compress(lines.encode(), "zstd", asbytes=True))
    pyarrow.parquet.write_table(pyarrow.table({"text": said, "id": range(300)}), tmp_path / "a.parquet")
    rows = "".join(f'{number}\t"{each}"\r\n' for number, each in enumerate(said))
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(f"\ufeffid\ttext\r\n{rows}".encode()))
    (tmp_path / "long.csv").write_text(f"text,id\n{'x' * 200_000},1\n")
    (tmp_path / "bad.csv").write_text("text,id\n" + "yes,1\n" * 300 + "no\n")
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(joined.removesuffix("\0").encode()))

    def whole(name, **how):
        return text.load(str(tmp_path / name), context=16, **how).train.read(np.arange(500))[0].ravel()

    of_field = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.tsv.gz", "a.parquet")
    for found in (*(whole(name, field="text") for name in of_field), whole("a.txt.xz")):
        assert found.tobytes() == np.frombuffer(joined.encode()[:8000], np.uint8).astype(np.int32).tobytes()

    assert (whole("long.csv", field="text") == ord("x")).all()

    (tmp_path / "b.txt").write_text(joined)
    prefix = str(tmp_path / "small")
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "b.txt"), model_prefix=prefix, vocab_size=40)
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    tokens = [token for each in said for token in [*model.encode(each), model.eos_id()]]
    assert whole("a.parquet", field="text", tokenizer=f"{prefix}.model").tolist() == tokens[:8000]

    (tmp_path / "bad.jsonl").write_text(f'{lines}\n{{"text": 3}}\n')
    (tmp_path / "wide.csv.zst").write_bytes(pyarrow.compress("text\nyes\n".encode("utf-16"), "zstd", asbytes=True))
    (tmp_path / "of.csv.jsonl").write_text(lines)
    (tmp_path / "wide.csv.gz").write_bytes(gzip.compress("text\nyes\n".encode("utf-16")))
    (tmp_path / "short.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-100])
    for name, field, reason in (
        ("a.jsonl", "words", r"line 1 is no JSON object that has 'words': '\{\"id\": 0"),
        ("bad.jsonl", "text", "line 301: there is no text 'text', but '3'"),
        ("a.parquet", "words", "there is no column 'words', but text, id"),
        ("a.parquet", "id", "row 0: there is no text 'id', but '0'"),
        ("a.parquet", "", r"has columns: say which is the text, as in text\(field='text'\)"),
        ("short.jsonl.gz", "text", "can't be read"),
        ("wide.csv.gz", "text", "is text in UTF-16"),
        ("wide.csv.zst", "text", "is text in UTF-16"),
        ("of.csv.jsonl", "words", "line 1 is no JSON object"),
        ("a.tsv.gz", "words", "there is no column 'words', but id, text"),
        ("bad.csv", "text", "row 301 has 1 columns, and the first 2 names"),
    ):
        with pytest.raises(DataError, match=reason):
            whole(name, field=field)


PRESET = """
import sys

import keras_hub

words = "[UNK] [PAD] [CLS] [SEP] [MASK] one curve on any hard ##ware through failure said 0 1 2 3 , .".split()
keras_hub.models.BertBackbone(len(words), 1, 1, 4, 4).save_to_preset(sys.argv[1])
keras_hub.models.BertTokenizer(words).save_to_preset(sys.argv[1])
"""


@pytest.mark.long
def test_tokens_of_a_keras_hub_preset(tmp_path):
    """A preset with a tokenizer of words: trained on, its tokens counted and turned back into text."""
    preset = tmp_path / "preset"
    subprocess.run([sys.executable, "-c", PRESET, str(preset)], env=environment(), check=True, capture_output=True)
    for number in range(4):
        line = f"one curve on any hardware, through any failure, said {number}.\n"
        (tmp_path / f"{number}.txt").write_text(line * 100)
    data = f"--dataset=text(files='*.txt',context=16,held_out=4,tokenizer='{preset}')"
    model = "--model=transformer(width=32,depth=1,heads=2,groups=2,hidden=32)"
    flags = (data, model, "--steps=60", "--learning_rate=0.01", f"--run_dir={tmp_path / 'run'}")
    out = trainer(*flags, f"--data_dir={tmp_path}", "--backend=jax").stdout
    assert "262 examples to train on" in out  # windows of 16 of 3 x (100 lines of 14 tokens, and an end token)
    assert summary(tmp_path / "run")["final"]["test_accuracy"] > 0.8  # the number in the held-out file was never seen
    loaded = text.load(str(tmp_path), "*.txt", context=16, held_out=4, tokenizer=str(preset))
    words = loaded.train.read(np.arange(8))[0].ravel()
    assert loaded.decode and "any hardware , through any failure , said 1 ." in loaded.decode(words)
    with pytest.raises(DataError, match="no preset of KerasHub"):
        text.load(str(tmp_path), "*.txt", tokenizer=str(tmp_path))
