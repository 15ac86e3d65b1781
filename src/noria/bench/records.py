"""What is asked and what came back: the two plain types that the client, the load and the figures share."""

from __future__ import annotations

from dataclasses import dataclass, field

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Question:
    """One request to send: a prompt as text or token ids, and the most tokens to generate."""

    prompt: Prompt
    output_len: int


@dataclass(slots=True)
class Record:
    """One request that was sent. Times are seconds of time.perf_counter().

    news: when parts of the answer arrived that hold text. end: when the last part arrived. Tokens are the server's own
    count. error: the kind of what went wrong, "" when nothing did; detail: the rest of that story.
    """

    start: float
    news: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""
    detail: str = ""

    @property
    def ttft(self) -> float:
        """From sending to the first part with text, or to the end of an answer that has none."""
        return (self.news[0] if self.news else self.end) - self.start

    @property
    def e2el(self) -> float:
        """From sending to the last part."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Between parts with text, which may hold several tokens each."""
        return [after - before for before, after in zip(self.news, self.news[1:])]
