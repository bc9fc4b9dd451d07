"""Text as tokens, of tokenizers that the tests make."""

import subprocess
import sys

import numpy as np
import pytest

from input_pipeline import mixture, text
from input_pipeline.source import DataError
from tests.running import environment, summary, trainer
from trainer import loading


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
