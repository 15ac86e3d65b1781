"""What the routes share: made once, passed through the application's state."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request

from noria.engine.client import EngineClient
from noria.errors import UnavailableError
from noria.server.dialect import Dialect, dialect_of
from noria.server.errors import ApiError
from noria.server.metrics import ServerMetrics
from noria.server.responses.store import ResponseStore
from noria.server.settings import ServerConfig

if TYPE_CHECKING:
    from noria.server.tracing import Tracing  # which needs an extra


@dataclass(slots=True)
class ServerState:
    engine: EngineClient
    config: ServerConfig
    model_names: tuple[str, ...]  # what requests may call the model; the first is its usual one
    model_path: str
    metrics: ServerMetrics
    tracing: Tracing | None = None
    created: int = field(default_factory=lambda: int(time.time()))  # of the model, in seconds since 1970
    draining: bool = False  # no new work is taken; what runs is finished
    active: int = 0  # HTTP requests that are not answered to the end, and responses in the background
    responses: ResponseStore = field(init=False)
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        self.dialect = dialect_of(self.config, self.engine.tokenizer)
        self.responses = ResponseStore(self.config.response_store_bytes)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for another model's."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise ApiError(
            404,
            f"the model {name!r:.200} does not exist here; there is {', '.join(self.model_names)}",
            param="model",
            code="model_not_found",
        )

    def check_open(self) -> None:
        """Raises UnavailableError when no new work is taken."""
        if self.draining:
            raise UnavailableError("the server is shutting down; ask another one")


def state_of(request: Request) -> ServerState:
    return cast("ServerState", request.app.state.noria)


State = Annotated[ServerState, Depends(state_of)]
