"""Make the golden values of a real model in a GGUF file: greedy continuations of five prompts by two oracles.

    pip install torch transformers gguf accelerate
    python tests/golden/make_real.py transformers smollm2 MODEL.gguf OUT.json
    pip install llama-cpp-python
    python tests/golden/make_real.py llama.cpp-float32 smollm2 DEQUANTIZED.gguf OUT.json
    python tests/golden/make_real.py llama.cpp smollm2 MODEL.gguf OUT.json

transformers dequantizes the weights and computes in float32: that is the truth. llama.cpp on a copy of the file in
float32 (dequantize_gguf.py) is an independent program that must say the same. On the packed file llama.cpp rounds the
activations to 8 bits, and its tokens are kept to show how much that changes. Each run writes its own part of OUT.json
and keeps the others'; all must turn a prompt into the same token ids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

NEW_TOKENS = {"smollm2": 48, "gemma3": 24}
ORACLES = {"transformers": "float32", "llama.cpp-float32": "llama_cpp_float32", "llama.cpp": "llama_cpp"}
LONG_PROMPT = Path(__file__).with_name("long_prompt.txt")
CODE = '''def is_prime(n: int) -> bool:
    """Whether n has no divisor other than 1 and itself."""
    if n < 2:
        return False
'''

Step = Callable[[list[int]], np.ndarray]  # new token ids of the sequence -> logits after the last of them, [vocab]
Oracle = tuple[Callable[[str], list[int]], Callable[[], Step], str | None, dict[str, str]]


def prompts(model: str, template: str | None) -> Iterator[dict[str, Any]]:
    """Name and text of each prompt; a chat prompt with its messages too."""
    paragraphs = LONG_PROMPT.read_text().rstrip("\n").split("\n\n")
    yield {"name": "fact", "text": "The capital of France is"}
    yield {"name": "story", "text": "Once upon a time, in a small village by the sea, there lived an old fisherman who"}
    yield {"name": "code", "text": CODE}
    if model == "smollm2":
        messages = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(template or "").render(messages=messages, add_generation_prompt=True)
        yield {"name": "chat", "text": text, "messages": messages}
        yield {"name": "long", "text": "\n\n".join(paragraphs[:3])}
    else:
        yield {"name": "languages", "text": "English: Good morning! 🌞\nFrançais : Bonjour !\nDeutsch:"}
        yield {"name": "long", "text": "\n\n".join(paragraphs)}  # longer than the model's sliding window of 512


def greedy(step: Step, token_ids: list[int], count: int) -> dict[str, list[Any]]:
    """The continuation past any end token; at each step the gap of the two best logits, and which one was second."""
    new = {"token_ids": [], "gaps": [], "runners_up": []}
    logits = step(token_ids)
    for index in range(count):
        second, best = np.argsort(logits)[-2:]
        new["token_ids"].append(int(best))
        new["gaps"].append(round(float(logits[best] - logits[second]), 5))
        new["runners_up"].append(int(second))
        if index + 1 < count:
            logits = step([int(best)])
    return new


def transformers_oracle(path: Path) -> Oracle:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    reader = gguf.GGUFReader(path)
    _check_norms(model, reader)

    def start() -> Step:
        cache = None

        def step(token_ids: list[int]) -> np.ndarray:
            nonlocal cache
            with torch.no_grad():
                out = model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            return out.logits[0, -1].numpy()

        return step

    template = reader.fields.get("tokenizer.chat_template")
    tools = {name: version(name) for name in ("transformers", "torch", "tokenizers", "gguf")}
    return (lambda text: tokenizer(text)["input_ids"]), start, template and template.contents(), tools


def _check_norms(model: Any, reader: Any) -> None:
    """Gemma's norms multiply by 1 + weight and its GGUF files store the sum: the loader must have taken the 1 away."""
    stored = next(tensor.data for tensor in reader.tensors if tensor.name == "output_norm.weight")
    expected = stored - 1 if model.config.model_type.startswith("gemma") else stored
    np.testing.assert_array_equal(model.model.norm.weight.detach().numpy(), expected)


def llama_cpp_oracle(path: Path) -> Oracle:
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=1024,
        n_threads=1,
        n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )

    def start() -> Step:
        model.reset()

        def step(token_ids: list[int]) -> np.ndarray:
            model.eval(token_ids)
            return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(model.n_vocab(),)).copy()

        return step

    adds_bos = model.metadata.get("tokenizer.ggml.add_bos_token") == "true"
    template = model.metadata.get("tokenizer.chat_template")
    tools = {"llama-cpp-python": version("llama-cpp-python")}
    return (lambda text: model.tokenize(text.encode(), add_bos=adds_bos, special=True)), start, template, tools


def compare(name: str, ours: dict[str, list[Any]], truth: dict[str, list[Any]]) -> str:
    """Where llama.cpp leaves the continuation of transformers, how near a tie that was, how far the gaps are apart."""
    for index, (a, b) in enumerate(zip(ours["token_ids"], truth["token_ids"], strict=True)):
        if a != b:
            gaps = f"gap {truth['gaps'][index]} in float32, {ours['gaps'][index]} in llama.cpp"
            return f"{name}: differ at token {index}: {gaps}, is the runner-up: {a == truth['runners_up'][index]}"
    apart = max(abs(a - b) for a, b in zip(ours["gaps"], truth["gaps"], strict=True))
    return f"{name}: equal, smallest gap {min(truth['gaps'])}, gaps differ by {apart:.1e} at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("oracle", choices=tuple(ORACLES))
    parser.add_argument("model", choices=tuple(NEW_TOKENS))
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    path = arguments.gguf.resolve()
    part = ORACLES[arguments.oracle]
    make = transformers_oracle if part == "float32" else llama_cpp_oracle
    tokenize, start, template, tools = make(path)
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    known_prompts = {prompt["name"]: prompt for prompt in known.get("prompts", ())}
    found = []
    for prompt in prompts(arguments.model, template):
        prompt["token_ids"] = tokenize(prompt["text"])
        prompt[part] = greedy(start(), prompt["token_ids"], NEW_TOKENS[arguments.model])
        before = known_prompts.get(prompt["name"], {})
        if before and (before["text"], before["token_ids"]) != (prompt["text"], prompt["token_ids"]):
            raise SystemExit(f"{prompt['name']}: other ids than before: {prompt['token_ids']}, {before['token_ids']}")
        found.append(before | prompt)
        if part != "float32" and "float32" in before:
            print(compare(prompt["name"], prompt[part], before["float32"]), flush=True)
    result = known | {"tools": known.get("tools", {}) | tools, "prompts": found}
    if part == "float32":
        result |= {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
