"""noria chat: conversations from a pipe and from a terminal."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator

import pytest
from command_line import Outcome

from noria.cli import chat
from noria.engine.llm import LLM

Noria = Callable[..., Outcome]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, lines: list[str | type[BaseException]]) -> None:
    """What a person types; an exception stands for the key that causes it."""
    script = iter([*lines, EOFError])

    def answer(prompt: str) -> str:
        item = next(script)
        if isinstance(item, str):
            return item
        raise item

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", answer)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every prompt that the engine is asked."""
    seen: list[str] = []
    stream = LLM.stream

    def record(self: LLM, prompt: list[int], params: object) -> Iterator[object]:
        seen.append(self.tokenizer.decode(prompt, skip_special_tokens=False))
        return stream(self, prompt, params)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(LLM, "stream", record)
    return seen


def test_a_conversation_from_a_pipe(
    noria: Noria, chat_model: str, small: list[str], monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nyou?\n/reset\n/what now\nHi\n/exit\nnever read\n"))
    outcome = noria("chat", chat_model, "--system", "Be", "--max-tokens", "6", "--temperature", "0", *small)
    assert outcome.status == 0, outcome.err
    first, second, third = outcome.out.splitlines()  # the tiny model writes no line ends here
    assert first == third  # after /reset the same question gets the same answer
    beginning = "<start>system: Be<end><start>user: Hi<end><start>assistant: "
    assert prompts[0] == prompts[2] == beginning
    assert prompts[1] == f"{beginning}{first}<end><start>user: you?<end><start>assistant: "
    assert len(prompts) == 3
    assert second
    assert "the conversation is forgotten" in outcome.err
    assert "unknown command /what" in outcome.err
    assert outcome.err.splitlines()[-1] == "compiles_after_warmup 0"


def test_a_conversation_in_a_terminal(
    noria: Noria, chat_model: str, small: list[str], monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    """Ctrl-C at the prompt drops a line, a message that is too long is reported and dropped, Ctrl-D ends."""
    typed(monkeypatch, ["Hi", KeyboardInterrupt, "z" * 200, "so"])
    outcome = noria("chat", chat_model, "--max-tokens", "6", "--temperature", "0", *small)
    assert outcome.status == 0, outcome.err
    assert "max_model_len (96)" in outcome.err
    assert "/reset starts over" in outcome.err
    assert "Traceback" not in outcome.err
    assert "z" not in prompts[-1]
    assert "user: Hi<end>" in prompts[-1]
    assert prompts[-1].endswith("user: so<end><start>assistant: ")


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    noria: Noria, chat_model: str, small: list[str], monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    stream = LLM.stream
    running: list[bool] = []

    def press(self: LLM, prompt: list[int], params: object) -> Iterator[object]:
        for count, part in enumerate(stream(self, prompt, params)):  # pyright: ignore[reportArgumentType]
            if count == 2 and len(prompts) == 1:
                signal.raise_signal(signal.SIGINT)
            yield part
        running.append(self._front.has_unfinished)

    monkeypatch.setattr(LLM, "stream", press)
    typed(monkeypatch, ["Hi", "on"])
    options = ("--max-tokens", "20", "--temperature", "0", "--ignore-eos")
    outcome = noria("chat", chat_model, *options, *small)
    assert outcome.status == 0, outcome.err
    assert len(prompts) == 2
    assert running == [False]  # the second answer ended by itself and nothing of the first was left over
    stopped = outcome.out.splitlines()[0]
    assert f"assistant: {stopped}<end>" in prompts[1]


def test_a_second_ctrl_c_breaks_in() -> None:
    before = signal.getsignal(signal.SIGINT)
    with chat._interrupts() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_pipe_ends_at_a_message_that_cannot_be_answered(
    noria: Noria, chat_model: str, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("z" * 200 + "\nHi\n"))
    message = noria("chat", chat_model, *small).error()
    assert "max_model_len (96)" in message


def test_a_model_without_template_cannot_chat(noria: Noria, plain_model: str, small: list[str]) -> None:
    outcome = noria("chat", plain_model, *small)
    assert outcome.status == 1
    assert "has no chat template; let it continue a text with noria run" in outcome.error()
    assert "compiling" not in outcome.err
