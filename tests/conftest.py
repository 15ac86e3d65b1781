"""What all tests share. The environment is set before any test module can import jax or a client of the Hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import hypothesis
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"  # results are compared bit for bit, so every machine runs them on the same kind
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that forgets to stay at home fails at once instead of downloading

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as of what a shell starts in the background: Ctrl-C is tested, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a shape compiles, so the time of one example says nothing.
hypothesis.settings.register_profile("noria", deadline=None, print_blob=True)
hypothesis.settings.load_profile("noria")


@pytest.fixture(scope="session")
def compile_cache_dir(pytestconfig: pytest.Config) -> str:
    """Folder for the option of the same name: engines of one run, and of later runs, share what they compiled.

    Lives in pytest's own cache, so `pytest --cache-clear` empties it.
    """
    return str(pytestconfig.cache.mkdir("noria-programs"))


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that speaks: the golden Llama (192 tokens, random weights) with a byte-level tokenizer beside it.

    Ids 0 to 2 are <pad>, <s> and </s> (which ends a text, as generation_config.json says too), 3 to 5 the marks of the
    chat template, the rest the bytes of ASCII and of a few letters, and merges learnt from a few words. The weights are
    random, so the text it writes is noise that repeats from run to run.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    controls = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=192, special_tokens=controls, limit_alphabet=176, show_progress=False)
    ascii_letters = "".join(map(chr, range(32, 127))) + "\n"
    words = "the water wheel turns and the river runs under the old mill while the miller waits for the flour"
    library.train_from_iterator([ascii_letters, "éèüñ日本水車", words, words], trainer)
    folder = tmp_path_factory.mktemp("tiny_text_model")
    source = Path(__file__).parent / "golden" / "models" / "llama"
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    library.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
