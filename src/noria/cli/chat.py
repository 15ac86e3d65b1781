"""`noria chat`: a conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from noria.cli import options
from noria.cli.display import fetch, note
from noria.cli.run import start, tokenizer_of
from noria.config import EngineConfig, SamplingParams
from noria.errors import NoriaError, RequestError

if TYPE_CHECKING:
    from noria.engine.llm import LLM

_TEXT = """Talks with a model. Each line is a message; the model sees the whole conversation.

/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."""


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "chat",
        _TEXT,
        args,
        [
            options.model_argument(),
            options.option("system", str | None, None, "instructions that come before the conversation"),
        ],
        # Several answers at a time cannot be continued, and figures would be in the way of the text.
        sampling=options.sampling_options(
            skip=("n", "logprobs", "prompt_logprobs"), max_tokens=1024, temperature=0.7, top_p=0.95
        ),
        engine=options.engine_options(max_num_seqs=8),
    )
    params = options.sampling_params(chosen.sampling)
    config = EngineConfig(model=chosen.model, seed=params.seed, **options.values_of(chosen.engine))
    path = fetch(config.model, config.revision)
    # Loaded once more by the engine: a moment, while the start of a model that cannot chat may take a minute.
    if tokenizer_of(config, path).chat_template is None:
        raise RequestError(
            f"{config.model} has no chat template; let it continue a text with noria run, or name a model that is "
            "tuned for instructions"
        )
    with start(config, path) as llm:
        note(str(llm.stats.startup))
        interactive = sys.stdin.isatty()
        if interactive:
            note("/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer")
        _converse(llm, _lines(interactive), params, chosen.system, forgiving=interactive)
        note(f"compiles_after_warmup {llm.stats.compiles_after_warmup}")
    return 0


def _converse(llm: LLM, lines: Iterator[str], params: SamplingParams, system: str | None, *, forgiving: bool) -> None:
    """forgiving: a message that cannot be answered is reported and dropped; else it ends the conversation."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(beginning)
            note("the conversation is forgotten")
        elif text.startswith("/"):
            note(f"unknown command {text.split()[0]}; there are /reset and /exit")
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
            except RequestError as error:
                if not forgiving:
                    raise
                messages.pop()
                note(f"noria: error: {error} (/reset starts over)")


def _answer(llm: LLM, messages: Sequence[dict[str, str]], params: SamplingParams) -> str:
    """Streams the answer to stdout and returns what there is of it when Ctrl-C stops it."""
    [prompt] = llm.chat_prompts(messages)
    pieces: list[str] = []
    with _interrupts() as interrupted:
        for part in llm.stream(prompt, params):
            [output] = part.outputs
            pieces.append(output.text)
            print(output.text, end="", flush=True)
            if output.finish_reason == "error":
                raise NoriaError("the request failed while it ran; the log above says why")
            if interrupted():
                break
    print(flush=True)
    return "".join(pieces)


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed.

    The engine's state is whole only between steps, so an interrupt must not break into one; a second Ctrl-C does.
    """
    pressed = False

    def handler(signum: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise RequestError(f"stdin is not {error.encoding} text: {error.reason} at byte {error.start}") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and a history
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # at the prompt it drops the line that was begun, as in a shell
            print()
