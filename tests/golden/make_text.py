"""Makes tests/golden/text/*.json: token ids and token bytes of the two demo models by their original tokenizers.

    python tests/golden/make_text.py SMOLLM2.gguf GEMMA3.gguf

Needs noria, llama-cpp-python, sentencepiece and protobuf; only vocabularies are loaded. SmolLM2's ids are llama.cpp's
(transformers, when it reads a GGUF file, does not cut digits apart as this model was trained to see them). Gemma's are
those of the sentencepiece library, with a model made of the file's pieces and scores; llama.cpp must agree with them
wherever the text has no ▁, which it does not tell from a space in time. The bytes of tokens are llama.cpp's.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from noria.weights.gguf_file import read_metadata

TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    "Hello, y'all! How are you?",
    "I'm sure they'LL say we've SHOULD'VE been there; it's John's.",
    "The year 2024, 3.14159, 1,000,000 and 0x1F600 plus ½ ² Ⅷ ٣",
    " leading and trailing  ",
    "one  two   three    four",
    "indent:\n        eight\n            twelve\n\ttab\n\t\ttabs\r\nwindows\r\n\r\nend",
    " " * 17 + "x" + " " * 40 + "y" + " " * 100,
    "\n" * 5 + "a" + "\n" * 40 + " \n \n\n",
    "\t" * 3 + "x" + "\t" * 35 + " \t ",
    "def f(x: int) -> str:\n    return f'{x!r}' if x >= 0 else \"-\" * 3  # ok\n",
    "for (int i = 0; i < n; ++i) { a[i] ^= b->c & ~0xFFu; }\n#include <stdio.h>\n",
    "SELECT * FROM t WHERE a<>'b' AND c||d = $1;",
    "<table><tr><td>a</td></tr></table> <h1>t</h1></h1> <b>x</b><i></s></sub>",
    "emoji 😀 🎉🎉 👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️",
    "日本語のテキストです。中文文本，没有空格。한국어 텍스트",
    "Здравствуй, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "हिन्दी में लिखा हुआ पाठ। ภาษาไทยไม่มีช่องว่าง தமிழ்",
    "combining: e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343\u036a nfc é vs nfd e\u0301, ﬁ ligature, Å K Ω",
    "math ∑ᵢ xᵢ² ≤ ∫₀^∞ e⁻ˣ dx, 𝒜𝔅ℂ, ±×÷≠",
    "controls \x00\x01\x02\x07\x08\x0b\x0c\x1b[0m\x7f\x80\x9f end",
    "zero\u200bwidth\u200djoiner\ufeffbom\u00a0nbsp\u3000wide\u2028ls\u00adshy",
    "private \ue000 \uf8ff, unassigned \u0378 \U000e0001, last \U0010ffff, noncharacter \ufffe",
    "replacement \ufffd and sentence piece ▁ and ▁▁ itself",
    "rare 𐍈 𓀀 𠜎 𝄞 ꙮ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos><eos><pad><unk><|endoftext|>text<unused12><0x0A><0xFF>",
    "<|im_start|><|im_start|> <|im_end|>x<|im_end|",
    "a<start_of_image>b[multimodal]<mask>",
    "http://example.org/path?q=a+b&c=%20#frag mail@example.org",
    "camelCaseAndPascalCase snake_case_name SCREAMING_CASE kebab-case x86_64",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "....... ------ ======= !!!!?? ((([[[{{{ }}}]]])))",
    "Mixed 中文 and English 和 emoji 😀text",
    "The quick brown fox jumps over the lazy dog. " * 3,
]


def main(smollm2: str, gemma3: str) -> None:
    folder = Path(__file__).parent / "text"
    folder.mkdir(exist_ok=True)
    version = f"llama-cpp-python {llama_cpp.__version__}"
    for name, path in (("smollm2-135m-instruct", smollm2), ("gemma-3-270m", gemma3)):
        model = llama_cpp.Llama(model_path=path, vocab_only=True, verbose=False)
        ids_of = {text: _encode(model, text) for text in [*TEXTS, *_random_texts()]}
        oracle = version
        if path == gemma3:
            ids_of = _checked(ids_of, _sentencepiece(path))
            oracle = f"sentencepiece {sentencepiece.__version__}, {version}"
        cases = [{"text": text, "ids": ids} for text, ids in ids_of.items()]
        count = model.n_vocab()
        tokens = sorted({*range(300), *random.Random(2).sample(range(count), 300), *range(count - 20, count)})
        pieces = {str(token): _piece(model, token).hex() for token in tokens}
        golden = {"oracle": oracle, "cases": cases, "pieces": pieces}
        text = (
            json.dumps(golden, separators=(",", ":")).replace('{"text"', '\n{"text"').replace('"pieces"', '\n"pieces"')
        )
        (folder / f"{name}.json").write_text(text + "\n", encoding="ascii")
        print(name, len(cases), "texts", len(pieces), "pieces")


def _checked(ids_of: dict[str, list[int]], encode: Callable[[str], list[int]]) -> dict[str, list[int]]:
    """The ids of sentencepiece for the same texts, after comparing."""
    for text, ids in ids_of.items():
        if "\u2581" not in text and encode(text) != ids:
            sys.exit(f"llama.cpp and sentencepiece differ on {text!r}: {ids} and {encode(text)}")
    return {text: encode(text) for text in ids_of}


def _sentencepiece(path: str) -> Callable[[str], list[int]]:
    """An encoder with the pieces and scores of a GGUF file of Gemma.

    Control tokens are made user-defined ones, as noria too finds them in a text; the unknown token is a new one.
    """
    metadata = read_metadata(Path(path))
    tokens, scores, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    proto = sentencepiece_model_pb2.ModelProto()
    normal, unknown, user_defined, byte = 1, 2, 4, 6
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        literal = int(kind) not in (normal, byte)
        text = token.decode("utf-8")
        proto.pieces.add(
            piece=text.replace(" ", "\u2581") if literal else text,
            score=float(score),
            type=user_defined if literal else int(kind),
        )
    proto.pieces.add(piece="[unknown]", score=0.0, type=unknown)
    proto.trainer_spec.model_type = 2  # BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_piece = "[unknown]"
    proto.trainer_spec.unk_id = len(tokens)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return processor.encode


def _random_texts() -> list[str]:
    """Unlikely neighbours: characters of many scripts, spaces and line breaks in any order."""
    rng = random.Random(1)
    alphabet = "aeiotnsrAEZ019 \n\t  .,'\"<>/|_-éßñ你好世界のはабв😀👍\u0301\u200d▁"
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(150)]


def _encode(model: llama_cpp.Llama, text: str) -> list[int]:
    return model.tokenize(text.encode("utf-8"), add_bos=False, special=True)


def _piece(model: llama_cpp.Llama, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(1024)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    size = llama_cpp.llama_token_to_piece(vocabulary, token, buffer, len(buffer), 0, True)
    return buffer.raw[:size]


if __name__ == "__main__":
    main(*sys.argv[1:])
