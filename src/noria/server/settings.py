"""Options of the server, beside those of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from noria.errors import ConfigError

ToolFormat = Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"]
ReasoningFormat = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises ConfigError when a value is out of range."""

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 for all of this machine's
    port: int = 8000  # 0: any that is free; the first line on stderr says which
    api_key: tuple[str, ...] = ()  # clients must send one of these as a bearer token; none: everybody may ask
    served_model_name: tuple[str, ...] = ()  # what requests call the model; none: its name on the command line
    max_body_bytes: int = 16 << 20  # of a request's body; a longer one is refused with 413
    max_queued_requests: int = 1024  # sequences that may wait beyond those that run; more are refused with 429
    response_store_bytes: int = 256 << 20  # for responses that are kept, in memory, for later; 0 keeps none
    request_timeout: float | None = None  # seconds from a request to the end of its answer; None: no limit
    drain_timeout: float = 30.0  # seconds that running requests get to finish after SIGTERM
    engine_timeout: float = 60.0  # seconds of silence after which the engine counts as frozen and /ready turns red
    chat_page: bool = True  # a page at / to talk to the model from a browser
    access_log: bool = False  # a line of JSON on stderr for every request: its id, path, status and seconds
    tool_call_parser: ToolFormat = "auto"  # how the model writes tool calls; auto: as its chat template says
    reasoning_parser: ReasoningFormat = "auto"  # how it marks what it thinks before it answers
    enable_auto_tool_choice: bool = True  # a request with tools may leave it to the model whether it calls
    otlp_traces_endpoint: str | None = None  # URL of a collector that takes OpenTelemetry spans (OTLP over HTTP)
    replicas: int = 1  # engines behind this address, spread over machines by Ray Serve; needs noria[ray]
    on_engine_death: Literal["restart", "exit"] = "restart"  # when the engine dies after it had been ready

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.port < 2**16, f"port must be 0 to 65535, not {self.port}"),
            (self.replicas >= 1, f"replicas must be at least 1, not {self.replicas}"),
            (self.replicas == 1 or self.port, "replicas need a port that is known; name one"),
            (all(self.api_key), "api_key must not be empty"),
            (all(key.isascii() and key.isprintable() for key in self.api_key), "api_key must be printable ASCII"),
            (all(self.served_model_name), "served_model_name must not be empty"),
            (self.max_body_bytes >= 1, f"max_body_bytes must be at least 1, not {self.max_body_bytes}"),
            (self.max_queued_requests >= 0, f"max_queued_requests must be at least 0, not {self.max_queued_requests}"),
            (
                self.response_store_bytes >= 0,
                f"response_store_bytes must be at least 0, not {self.response_store_bytes}",
            ),
            (
                self.request_timeout is None or self.request_timeout > 0,
                f"request_timeout must be positive, not {self.request_timeout}",
            ),
            (self.drain_timeout >= 0, f"drain_timeout must be at least 0, not {self.drain_timeout}"),
            (self.engine_timeout > 0, f"engine_timeout must be positive, not {self.engine_timeout}"),
            (
                (self.otlp_traces_endpoint or "http://").startswith(("http://", "https://")),
                "otlp_traces_endpoint must be a URL like http://localhost:4318/v1/traces, "
                f"not {self.otlp_traces_endpoint!r}",
            ),
        )
        for good, message in checks:
            if not good:
                raise ConfigError(message)
