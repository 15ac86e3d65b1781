"""noria run on a tiny model: streaming, JSON, sampling options, chat template."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from command_line import CHAT_TEMPLATE, MODEL, Outcome, tiny_tokenizer

Noria = Callable[..., Outcome]
PROMPT = "The old mill turns"


@pytest.fixture
def run_json(noria: Noria, small: list[str]) -> Callable[..., dict[str, Any]]:
    def run(*args: str) -> dict[str, Any]:
        outcome = noria("run", *args, "--json", *small)
        assert outcome.status == 0, outcome.err
        [line] = outcome.out.splitlines()
        return json.loads(line)

    return run


def decode(token_ids: list[int]) -> str:
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    return tiny_tokenizer(vocab_size).decode(token_ids, skip_special_tokens=True)


def test_json_tells_everything_about_a_request(run_json: Callable[..., dict[str, Any]], chat_model: str) -> None:
    answer = run_json(chat_model, "-p", PROMPT, "--raw", "--max-tokens", "20", "--ignore-eos")
    assert {"model", "chat_template", "text", "token_ids", "finish_reason", "stop_reason", "usage", "stats"} == set(
        answer
    )
    assert len(answer["token_ids"]) == 20
    assert answer["text"] == decode(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    assert answer["chat_template"] is False
    usage, stats = answer["usage"], answer["stats"]
    prompt_tokens = len(tiny_tokenizer(192).encode(PROMPT).ids)
    assert usage == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 20,
        "total_tokens": prompt_tokens + 20,
        "cached_tokens": 0,
    }
    assert stats["compiles_after_warmup"] == 0
    assert stats["programs"] > stats["programs_compiled"] >= 0 or stats["programs"] == stats["programs_compiled"] > 0
    assert stats["steps"] == 20
    assert 0 < stats["time_to_first_token_s"] < stats["total_s"]
    for name in ("start_s", "load_s", "warmup_s", "prefill_tok_s", "decode_tok_s", "weights_bytes", "kv_cache_bytes"):
        assert stats[name] > 0


def test_streamed_text_is_the_json_text_and_statistics_go_to_stderr(
    noria: Noria, run_json: Callable[..., dict[str, Any]], plain_model: str, small: list[str]
) -> None:
    args = (plain_model, "-p", PROMPT, "--max-tokens", "20", "--ignore-eos")
    outcome = noria("run", *args, *small)
    answer = run_json(*args)
    assert outcome.status == 0
    assert outcome.out == answer["text"] + "\n"
    assert len(answer["text"]) > 10
    assert "compiles_after_warmup 0" in outcome.err
    assert "programs ready" in outcome.err
    assert "KV cache" in outcome.err  # the memory plan
    # not a terminal: one plain line for each stage, and no control characters
    assert [line for line in outcome.err.splitlines() if line in ("loading weights", "compiling")] == [
        "loading weights",
        "compiling",
    ]
    assert "\x1b" not in outcome.err + outcome.out


def test_the_prompt_may_be_an_argument(run_json: Callable[..., dict[str, Any]], plain_model: str) -> None:
    options = ("--max-tokens", "4", "--ignore-eos")
    answers = [run_json(plain_model, *form, *options) for form in ((PROMPT,), ("-p", PROMPT))]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_a_chat_template_is_used_where_there_is_one(
    run_json: Callable[..., dict[str, Any]], chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens as for the rendered template given raw; and the prompt may come from stdin."""
    templated = run_json(chat_model, "-p", "Turn on", "--max-tokens", "12")
    rendered = "<start>user: Turn on<end><start>assistant: "
    assert "user" not in CHAT_TEMPLATE
    monkeypatch.setattr("sys.stdin", io.StringIO(rendered + "\n"))
    raw = run_json(chat_model, "-p", "-", "--raw", "--max-tokens", "12")
    assert templated["chat_template"] is True
    assert templated["usage"] == raw["usage"]
    assert templated["token_ids"] == raw["token_ids"]


def test_several_sequences_and_stop_conditions(
    noria: Noria, run_json: Callable[..., dict[str, Any]], plain_model: str, small: list[str]
) -> None:
    args = (plain_model, "-p", PROMPT, "--n", "3", "--temperature", "1.5", "--seed", "7", "--max-tokens", "12")
    answer = run_json(*args, "--ignore-eos")
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer["text"] == texts[0]
    assert answer["usage"]["completion_tokens"] == 36
    shown = noria("run", *args, "--ignore-eos", *small)
    assert shown.out == "".join(f"[{index}] {text}\n" for index, text in enumerate(texts))

    token, later = answer["choices"][1]["token_ids"][2], texts[2][4:6]
    stopped = run_json(*args, "--stop-token-ids", str(token), "--stop", "never-said", "--stop", later)
    assert stopped["choices"][1]["token_ids"][-1] == token
    assert stopped["choices"][1]["stop_reason"] == token
    assert stopped["choices"][2]["text"] == texts[2].split(later)[0]
    assert stopped["choices"][2]["stop_reason"] == later
    assert {stopped["choices"][i]["finish_reason"] for i in (1, 2)} == {"stop"}


def test_log_probabilities_are_printed_when_asked_for(
    run_json: Callable[..., dict[str, Any]], plain_model: str
) -> None:
    args = (plain_model, "-p", PROMPT, "--max-tokens", "5", "--ignore-eos")
    answer = run_json(*args, "--logprobs", "2", "--prompt-logprobs", "0")
    assert len(answer["logprobs"]) == 5
    for token_id, figures in zip(answer["token_ids"], answer["logprobs"]):
        assert figures[str(token_id)]["rank"] == 1
        assert figures[str(token_id)]["decoded_token"] == decode([token_id])
        assert len(figures) == 2
    own = [figures[str(i)]["logprob"] for i, figures in zip(answer["token_ids"], answer["logprobs"])]
    assert answer["cumulative_logprob"] == pytest.approx(sum(own))
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    several = run_json(*args, "--n", "2", "--logprobs", "0")
    assert [len(choice["logprobs"]) for choice in several["choices"]] == [5, 5]
    assert "prompt_logprobs" not in several


def test_biases_and_bans(run_json: Callable[..., dict[str, Any]], plain_model: str) -> None:
    args = (plain_model, "-p", PROMPT, "--max-tokens", "5", "--ignore-eos")
    assert run_json(*args, "--logit-bias", "9=100", "--logit-bias", "10=-1")["token_ids"] == [9] * 5
    assert (
        run_json(*args, "--allowed-token-ids", "9", "--allowed-token-ids", "8", "--bad-token-ids", "8")["token_ids"]
        == [9] * 5
    )
    plain = run_json(*args)["token_ids"]
    assert run_json(*args, "--presence-penalty", "2", "--repetition-penalty", "5")["token_ids"] != plain
