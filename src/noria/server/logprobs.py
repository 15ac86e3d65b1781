"""Log-probabilities in the shapes of the API: one for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from noria.engine.outputs import CompletionOutput, TokenLogprobs
from noria.text.tokenizer import Tokenizer


def for_chat(output: CompletionOutput, tokenizer: Tokenizer, num_top: int) -> dict[str, Any] | None:
    """One entry for each token of `output`, with the num_top likeliest in its place; None when nobody asked."""
    if output.logprobs is None:
        return None
    content = []
    for token in output.logprobs:
        entries = [_entry(tokenizer, token_id, each.logprob) for token_id, each in token.items()]
        # The first is the token that is there; it is repeated among the likeliest when it is one of them.
        top = entries[1:] if len(entries) > num_top else _by_logprob(entries)
        content.append({**entries[0], "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_bytes(token_id)
    return {"token": text.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(text)}


def _by_logprob(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: -entry["logprob"])


class CompletionLogprobs:
    """Those of one choice, which may come in pieces: offsets go on where the last piece ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0  # characters of the tokens so far, each by itself

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next tokens; the first token of a prompt has no probability."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, token in zip(token_ids, logprobs, strict=True):
            text = self._text(token_id)
            found["text_offset"].append(self._offset)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if token is None else token[token_id].logprob)
            found["top_logprobs"].append(None if token is None else self._by_text(token))
            self._offset += len(text)
        return found

    def _by_text(self, token: TokenLogprobs) -> dict[str, float]:
        """Of tokens with one text (halves of characters have none of their own) the first is shown."""
        by_text: dict[str, float] = {}
        for token_id, each in token.items():
            by_text.setdefault(self._text(token_id), each.logprob)
        return by_text

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two pieces of CompletionLogprobs as one."""
    return {name: first[name] + second[name] for name in first}
