"""What those who run a server see: health, readiness, metrics, keys, request ids, limits."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from fake_engine import ask, run, service
from test_refusals import CHAT, COMPLETIONS, GOOD, HELLO, error_of

import noria
from noria.errors import ConfigError
from noria.server.settings import ServerConfig
from noria.text.tokenizer import Tokenizer


def test_alive_ready_and_versioned(tokenizer: Tokenizer) -> None:
    assert ask(tokenizer, "GET", "/health").json() == {"status": "alive"}
    assert ask(tokenizer, "GET", "/ready").json() == {"status": "ready"}
    assert ask(tokenizer, "GET", "/version").json() == {"version": noria.__version__}


def test_models(tokenizer: Tokenizer) -> None:
    listed = ask(tokenizer, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["parrot", "polly"]
    assert ask(tokenizer, "GET", "/v1/models/polly").json() == listed["data"][1]
    assert listed["data"][0]["max_model_len"] == 128
    assert error_of(ask(tokenizer, "GET", "/v1/models/org/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/nothing", 404, "there is no GET /v1/nothing here"),
        ("POST", "/v1/completions/", 404, "there is no POST"),
        ("GET", "/v1/completions", 405, "GET /v1/completions: the method is not allowed"),
        ("POST", "/v1/models", 405, "the method is not allowed"),
    ],
)
def test_wrong_addresses(tokenizer: Tokenizer, method: str, path: str, status: int, message: str) -> None:
    response = ask(tokenizer, method, path)
    assert message in error_of(response, status)["message"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer secretx", "Bearer s\u00e9cret"]
)
def test_a_wrong_key(tokenizer: Tokenizer, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    options = {"api_key": ("secret", "other")}
    for path, body in ((COMPLETIONS, GOOD), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
        response = ask(tokenizer, "POST", path, options, json=body, headers=headers)
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert ask(tokenizer, "GET", "/v1/models", options, headers=headers).status_code == 401


def test_a_right_key(tokenizer: Tokenizer) -> None:
    options = {"api_key": ("secret", "other")}
    for header in ("Bearer secret", "bearer other", "Bearer  secret "):
        response = ask(tokenizer, "POST", COMPLETIONS, options, json=GOOD, headers={"Authorization": header})
        assert response.status_code == 200
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert ask(tokenizer, "GET", path, options).status_code == 200


def test_request_ids(tokenizer: Tokenizer) -> None:
    given = ask(tokenizer, "POST", COMPLETIONS, json=GOOD, headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = {ask(tokenizer, "GET", "/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    streamed = ask(tokenizer, "POST", COMPLETIONS, json={**GOOD, "stream": True}, headers={"X-Request-Id": "mine-2"})
    assert streamed.headers["x-request-id"] == "mine-2"
    refused = ask(tokenizer, "POST", COMPLETIONS, json={}, headers={"X-Request-Id": "mine-3"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine-3")
    for bad in ("", "x" * 300, "a b", "\u00e9"):
        response = ask(tokenizer, "GET", "/health", headers={"X-Request-Id": bad.encode("latin-1")})
        assert "x-request-id must be" in error_of(response)["message"]
        assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("size", [101, 1000])
def test_a_body_that_is_too_large(tokenizer: Tokenizer, size: int) -> None:
    body = b'{"prompt": "' + b"a" * size
    response = ask(tokenizer, "POST", COMPLETIONS, {"max_body_bytes": 100}, content=body)
    assert error_of(response, 413)["message"] == "the body exceeds max_body_bytes (100)"
    assert ("connection" in response.headers) == (size > 400)  # which is not read to its end

    async def pieces() -> Any:
        for _ in range(0, size, 10):
            yield b"a" * 10
        yield b"aa"

    response = ask(tokenizer, "POST", COMPLETIONS, {"max_body_bytes": 100}, content=pieces())  # of unknown length
    assert error_of(response, 413)["code"] == "body_too_large"


def test_the_access_log(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "noria.access"):
        ask(tokenizer, "GET", "/health", headers={"X-Request-Id": "quiet"})
        options = {"access_log": True}
        ask(tokenizer, "POST", COMPLETIONS, options, json=GOOD, headers={"X-Request-Id": "loud"})
        ask(tokenizer, "GET", "/nowhere", options)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "noria.access"]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", COMPLETIONS, 200),
        ("GET", "/nowhere", 404),
    ]
    assert lines[0]["request_id"] == "loud"
    assert 0 < lines[0]["seconds"] < 30


def samples(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(noria:[^\s{]+){.*} (\S+)$", text, re.MULTILINE)}


def test_metrics(tokenizer: Tokenizer) -> None:
    async def work() -> tuple[dict[str, float], str]:
        async with service(tokenizer) as running:
            for body in ({}, {"stream": True}, {"n": 2}):
                assert (await running.http.post(COMPLETIONS, json={**GOOD, **body})).status_code == 200
            response = await running.http.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return samples(response.text), response.text

    found, text = run(work())
    num_prompt = len(tokenizer.encode("flour"))
    assert found["noria:prompt_tokens_total"] == 3 * num_prompt
    assert found["noria:generation_tokens_total"] == 16
    assert 'noria:request_success_total{finished_reason="length",model_name="parrot"} 4.0' in text
    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens"),
    ):
        assert found[f"noria:{name}_count"] == 3, name
    assert found["noria:inter_token_latency_seconds_count"] == 9
    assert found["noria:request_generation_tokens_sum"] == 16
    assert found["noria:num_requests_running"] == found["noria:kv_cache_usage_perc"] == 0
    assert (found["noria:prefix_cache_queries_total"], found["noria:prefix_cache_hits_total"]) == (40, 10)
    assert found["noria:prefix_cache_hit_rate"] == found["noria:host_gap_share"] == 0.25
    assert found["noria:spec_decode_num_drafts_total"] == 4
    assert found["noria:spec_decode_num_draft_tokens_total"] == 9
    assert found["noria:spec_decode_num_accepted_tokens_total"] == 6
    assert 'noria:spec_decode_num_accepted_tokens_per_pos_total{model_name="parrot",position="1"} 2.0' in text
    assert found["noria:engine_steps_total"] >= 12
    assert found["noria:num_preemptions_total"] == found["noria:compiles_after_warmup_total"] == 0


def test_the_openapi_document_describes_the_bodies(tokenizer: Tokenizer) -> None:
    document = ask(tokenizer, "GET", "/openapi.json").json()
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert {"CompletionBody", "ChatBody", "Message", "TokenizeBody", "DetokenizeBody"} <= references
    assert references <= set(document["components"]["schemas"])
    assert set(document["paths"]["/v1/completions"]) == {"post"}


def test_a_frozen_engine_turns_readiness_red(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, engine_timeout=0.1) as running:

            async def ready() -> httpx.Response:
                return await running.http.get("/ready")

            assert (await ready()).status_code == 200
            running.core.frozen = True
            await asyncio.sleep(0.25)
            response = await ready()
            assert response.status_code == 503
            assert "has not answered for" in response.json()["status"]
            assert (await running.http.get("/health")).status_code == 200
            refused = await running.http.post(COMPLETIONS, json=GOOD)
            assert error_of(refused, 503)["code"] == "not_ready"
            assert refused.headers["retry-after"] == "1"
            running.core.frozen = False
            await asyncio.sleep(0.05)
            assert (await ready()).status_code == 200
            assert (await running.http.post(COMPLETIONS, json=GOOD)).status_code == 200

    run(work())


def test_an_engine_that_starts_is_not_ready(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer) as running:
            running.engine._facts = None
            assert (await running.http.get("/ready")).json() == {"status": "the engine is starting"}
            error_of(await running.http.post(COMPLETIONS, json=GOOD), 503)
            assert (await running.http.get("/v1/models")).status_code == 200

    run(work())


def test_a_server_that_drains_takes_nothing_new(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            before = asyncio.ensure_future(running.http.post(COMPLETIONS, json={**GOOD, "max_tokens": 40}))
            await running.steps(2)
            running.state.draining = True
            assert (await running.http.get("/ready")).status_code == 503
            refused = error_of(await running.http.post(CHAT, json={"messages": HELLO}), 503)
            assert "shutting down" in refused["message"]
            assert (await before).json()["usage"]["completion_tokens"] == 40

    run(work())


def test_an_unexpected_failure_tells_no_secrets(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret of the inside")

    monkeypatch.setattr("noria.server.routes.completions.new_id", fail)
    error = error_of(ask(tokenizer, "POST", COMPLETIONS, json=GOOD), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70000},
        {"port": -1},
        {"api_key": ("",)},
        {"api_key": ("k\u00e9y",)},
        {"served_model_name": ("",)},
        {"max_body_bytes": 0},
        {"max_queued_requests": -1},
        {"request_timeout": 0.0},
        {"drain_timeout": -1.0},
        {"engine_timeout": 0.0},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ConfigError, match=f"^{name} must"):
        ServerConfig(**options)
