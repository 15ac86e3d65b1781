"""Batches through the application, with an engine that computes nothing: every kind of line and of resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import run, service

from noria.errors import EngineDeadError, NoriaError
from noria.server.batch.files import Input, Output
from noria.server.batch.run import Tally, answer_all
from noria.text.tokenizer import Tokenizer

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def request(custom_id: Any, body: Any = None, url: str = COMPLETIONS, **rest: Any) -> dict[str, Any]:
    body = {"model": "parrot", "prompt": f"wheel {custom_id}", "max_tokens": 3} if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **rest}


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def read(path: Path) -> dict[str | None, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in found)
    assert len({line["id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


async def answered(tokenizer: Tokenizer, source: Path, target: Path, most: int = 4, **options: Any) -> Tally:
    async with service(tokenizer, **options) as running:
        entries = Input.open(source)
        with Output(target, entries) as output:
            return await answer_all(running.http, entries.lines(output.done), output, most)


def test_answers_are_those_of_http(tokenizer: Tokenizer, tmp_path: Path) -> None:
    bodies = {
        "text": (COMPLETIONS, {"model": "parrot", "prompt": "flour", "max_tokens": 4, "n": 2, "echo": True}),
        "ids": (COMPLETIONS, {"prompt": [[10, 11], [12, 13]], "max_tokens": 2, "logprobs": 1}),
        "chat": (CHAT, {"messages": [{"role": "user", "content": "wheel"}], "max_tokens": 5, "model": "polly"}),
        "refused": (COMPLETIONS, {"prompt": "a", "best_of": 2}),
        "model": (COMPLETIONS, {"prompt": "a", "model": "another"}),
        "long": (COMPLETIONS, {"prompt": [10] * 500}),
    }
    source = write(tmp_path / "in", *(request(name, body, url) for name, (url, body) in bodies.items()))

    async def work() -> tuple[Tally, dict[str, httpx.Response]]:
        tally = await answered(tokenizer, source, tmp_path / "out")
        async with service(tokenizer) as running:
            return tally, {name: await running.http.post(url, json=body) for name, (url, body) in bodies.items()}

    tally, expected = run(work())
    found = read(tmp_path / "out")
    assert set(found) == set(bodies)
    for name, response in expected.items():
        assert found[name]["error"] is None
        assert found[name]["response"]["status_code"] == response.status_code
        assert len(found[name]["response"]["request_id"]) == 32
        mine, theirs = found[name]["response"]["body"], response.json()
        for key in ("id", "created"):
            assert (key in mine) == (key in theirs)
            mine.pop(key, None), theirs.pop(key, None)
        assert mine == theirs
    assert (tally.answered, tally.failed) == (3, 3)
    usages = [expected[name].json()["usage"] for name in ("text", "ids", "chat")]
    assert tally.completion_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert tally.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)


def test_tokens_of_responses_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "in", request("a", {"input": "wheel", "max_output_tokens": 5}, RESPONSES))
    tally = run(answered(tokenizer, source, tmp_path / "out"))
    usage = read(tmp_path / "out")["a"]["response"]["body"]["usage"]
    assert (tally.prompt_tokens, tally.completion_tokens) == (usage["input_tokens"], usage["output_tokens"])
    assert tally.completion_tokens == 5


WRONG: tuple[tuple[Any, str | None, str], ...] = (
    (b"{not json\n", None, "line 2: JSON is malformed"),
    (b"[1]\n", None, "line 2: Expected `object`, got `array`"),
    (b'{"custom_id": "\xff"}\n', None, "line 2: "),
    ({"method": "POST", "url": COMPLETIONS, "body": {}}, None, "missing required field `custom_id`"),
    (request(7), None, "Expected `str`, got `int` - at `$.custom_id`"),
    (request(""), None, "custom_id must not be empty"),
    (request("x", method="GET"), "x", "method must be POST, not 'GET'"),
    (request("x", url="/v1/embeddings"), "x", "url must be /v1/chat/completions or /v1/completions"),
    (request("x", body=[1]), "x", "Expected `object`, got `array`"),
    (request("x", body={"prompt": "a", "stream": True}), "x", "stream does not work in a batch"),
    (request("x", {"input": "a", "background": True}, RESPONSES), "x", "background does not work in a batch"),
)


@pytest.mark.parametrize(("line", "custom_id", "message"), WRONG)
def test_a_wrong_line_gets_an_error_and_the_others_their_answers(
    tokenizer: Tokenizer, tmp_path: Path, line: Any, custom_id: str | None, message: str
) -> None:
    source = write(tmp_path / "in", request("a"), line, b"\n", request("b"))
    tally = run(answered(tokenizer, source, tmp_path / "out"))
    assert (tally.answered, tally.failed) == (2, 1)
    found = read(tmp_path / "out")
    assert set(found) == {"a", "b", custom_id}
    wrong = found[custom_id]
    assert wrong["response"] is None
    assert wrong["error"]["code"] == "invalid_line"
    assert message in wrong["error"]["message"]
    before = (tmp_path / "out").read_bytes()
    assert run(answered(tokenizer, source, tmp_path / "out")).lines == 0  # all have a result, wrong ones too
    assert (tmp_path / "out").read_bytes() == before


def test_work_goes_on_where_it_ended(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(request(f"r{n}") for n in range(20)))
    target = tmp_path / "out"
    run(answered(tokenizer, source, target))
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    half = lines[7][: len(lines[7]) // 2]
    for rest, kept in ((half, 7), (b"{broken}\n", 7), (lines[7][:-1], 7), (b"", 7)):
        target.write_bytes(b"".join(lines[:7]) + rest)
        assert run(answered(tokenizer, source, target)).lines == 20 - kept
        assert set(read(target)) == {f"r{n}" for n in range(20)}
        assert target.read_bytes().startswith(b"".join(lines[:kept]))


def test_an_engine_that_dies_costs_no_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(request(f"r{n}") for n in range(30)))

    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            entries = Input.open(source)
            with Output(tmp_path / "out", entries) as output:
                job = asyncio.ensure_future(answer_all(running.http, entries.lines(output.done), output, 4))
                while not (tmp_path / "out").read_bytes():
                    await asyncio.sleep(0.001)
                running.core.failure = RuntimeError("the device is gone")
                with pytest.raises(EngineDeadError):
                    await job

    run(work())
    found = read(tmp_path / "out")
    assert 0 < len(found) < 30
    assert {line["response"]["status_code"] for line in found.values()} == {200}
    assert run(answered(tokenizer, source, tmp_path / "out")).answered == 30 - len(found)


def test_a_batch_that_is_cancelled_leaves_whole_lines_and_no_work(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(request(f"r{n}") for n in range(30)))

    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            entries = Input.open(source)
            with Output(tmp_path / "out", entries) as output:
                job = asyncio.ensure_future(answer_all(running.http, entries.lines(output.done), output, 4))
                while not (tmp_path / "out").read_bytes():
                    await asyncio.sleep(0.001)
                job.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await job
            await running.until_idle()

    run(work())
    assert (tmp_path / "out").read_bytes().endswith(b"\n")
    assert 0 < len(read(tmp_path / "out")) < 30


def test_no_more_lines_are_read_than_can_be_asked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(request(f"r{n}") for n in range(40)))
    ahead, most = list[int](), 5

    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            entries = Input.open(source)
            with Output(tmp_path / "out", entries) as output:
                begun, done = 0, 0

                def counted() -> Any:
                    nonlocal begun
                    for line in entries.lines(output.done):
                        begun += 1
                        ahead.append(begun - done)
                        yield line

                def progress(finished: int) -> None:
                    nonlocal done
                    done = finished

                tally = await answer_all(running.http, counted(), output, most, progress)
                assert tally.answered == done == 40

    run(work())
    assert max(ahead) == most


def test_equal_custom_ids_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in", request("a"), request("b"), b"\n", request("a", url="/nowhere"))
    with pytest.raises(NoriaError, match="line 4 has the custom_id of line 1"):
        Input.open(source)
    with pytest.raises(NoriaError, match="cannot be read: No such file"):
        Input.open(tmp_path / "none")


def test_a_byte_order_mark(tmp_path: Path) -> None:
    source = write(tmp_path / "in", b"\xef\xbb\xbf", request("a"))
    [line] = Input.open(source).lines(frozenset())
    assert (line.custom_id, line.error) == ("a", "")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    source = Input.open(write(tmp_path / "in", request("a"), request("b")))
    result = {"id": "x", "custom_id": "a", "response": {"status_code": 200}, "error": None}
    other = write(tmp_path / "other", {**result, "custom_id": "z"})
    with pytest.raises(NoriaError, match="line 1 is the result of no line"):
        Output(other, source)
    foreign = write(tmp_path / "foreign", {"text": "my diary"}, result)
    with pytest.raises(NoriaError, match="line 1 is no result of a batch"):
        Output(foreign, source)
    assert "diary" in foreign.read_text()
    with pytest.raises(NoriaError, match="is the input; name another file"):
        Output(source.path, source)
    with pytest.raises(NoriaError, match="cannot be written"):
        Output(tmp_path / "no" / "out", source)
    with Output(tmp_path / "out", source), pytest.raises(NoriaError, match="another process writes"):
        Output(tmp_path / "out", source)
    failed = write(
        tmp_path / "failed", {**result, "response": None, "error": {"code": "x"}}, {**result, "custom_id": "b"}
    )
    with Output(failed, source) as output:
        assert output.num_failed == 1
        assert output.done == {"custom_id a", "custom_id b"}


class _Full:
    """A file on a full disk, which says so again when it is closed."""

    def write(self, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.write(b"")


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    output = Output(tmp_path / "out", Input.open(write(tmp_path / "in", request("a"))))
    output._file.close()
    output._file = _Full()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(NoriaError, match=rf"^{tmp_path}/out cannot be written: No space left on device$"), output:
        output.write(b"{}\n")
