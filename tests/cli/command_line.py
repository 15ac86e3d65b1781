"""What the tests of the command line share: a tiny model with a tokenizer, and what a command did."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL = Path(__file__).resolve().parent.parent / "golden" / "models" / "llama"
CHAT_TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant: {% endif %}"
)
SPECIAL = ("<pad>", "<start>", "<end>")  # the model's configuration says that 2 ends a text


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over printable ASCII, with as many merges as the vocabulary has room for."""
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), "\u0120", "\u010a"]  # the last two: space and line end
    pairs = [(first, second) for first in "etaoin" for second in "etaoinshrdlucmfwypv"]
    merges = pairs[: vocab_size - len(SPECIAL) - len(characters)]
    vocabulary = [*SPECIAL, *characters, *map("".join, merges)]
    assert len(vocabulary) == vocab_size
    library = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(vocabulary)}, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return library


def make_model(folder: Path, **tokenizer_config: Any) -> Path:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(MODEL / name, folder / name)
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    tiny_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def error(self) -> str:
        """The message of a command that failed as it should: one line, the last one, and no traceback."""
        assert self.status in (1, 2)
        assert self.out == ""
        assert "Traceback" not in self.err
        *before, last = self.err.splitlines()
        assert not any("error" in line for line in before)
        assert last.startswith("noria: error: ")
        assert not {"\u2500", "---"} & {last[i : i + n] for n in (1, 3) for i in range(len(last))}  # parts of a frame
        return last.removeprefix("noria: error: ")
