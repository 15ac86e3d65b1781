"""POST /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from noria.errors import RequestError
from noria.server.conversation import encode_conversation
from noria.server.errors import json_response
from noria.server.openapi import takes
from noria.server.requests import body_of
from noria.server.schema.tokenize import DetokenizeBody, TokenizeBody
from noria.server.state import State


def tokenize_routes() -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=takes(TokenizeBody))
    async def tokenize(state: State, body: Annotated[TokenizeBody, Depends(body_of(TokenizeBody))]) -> Response:
        state.check_model(body.model)
        tokenizer, facts = state.engine.tokenizer, state.engine.facts
        if body.prompt is None:
            token_ids = await encode_conversation(state, body)
        else:
            special = body.add_special_tokens is not False
            token_ids = await asyncio.to_thread(tokenizer.encode, body.prompt, add_special_tokens=special)
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in token_ids]
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": None if facts is None else facts.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    @router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
    async def detokenize(state: State, body: Annotated[DetokenizeBody, Depends(body_of(DetokenizeBody))]) -> Response:
        state.check_model(body.model)
        tokenizer = state.engine.tokenizer
        for token_id in body.tokens:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise RequestError(f"tokens: {token_id} is not a token id; ids are 0 to {tokenizer.vocab_size - 1}")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    return router
