"""noria batch on a tiny model: interrupted, gone on with, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome

Noria = Callable[..., Outcome]
COUNT = 120


def line(index: int) -> dict[str, Any]:
    if index % 2:
        messages = [{"role": "user", "content": f"wheel {index}"}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 40}
        url = "/v1/chat/completions"
    else:
        body, url = {"prompt": f"river {index}", "max_tokens": 40}, "/v1/completions"
    body |= {"model": "wheel", "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"r{index}", "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines))
    return path


def interrupt(args: list[str], target: Path, log: Path, *, kill_engine: bool) -> int:
    """Runs a batch until a few more lines are answered, ends it by Ctrl-C or by its engine; returns its status."""
    before = target.read_bytes().count(b"\n") if target.exists() else 0
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "noria", *args], stdout=file, stderr=file)
        deadline = time.monotonic() + 120
        while not target.exists() or target.read_bytes().count(b"\n") < before + 3:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if kill_engine:
            [engine] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(engine), signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT)
        status = process.wait(30)
    assert "Traceback" not in log.read_text()
    assert target.read_text().endswith("\n")
    assert before + 3 <= target.read_text().count("\n") < COUNT
    return status


def test_a_batch_that_ended_early_goes_on(noria: Noria, chat_model: str, small: list[str], tmp_path: Path) -> None:
    source, target, log = write(tmp_path / "in", [line(n) for n in range(COUNT)]), tmp_path / "out", tmp_path / "log"
    args = ["batch", str(source), str(target), "--model", chat_model, "--served-model-name", "wheel", *small]
    assert interrupt(args, target, log, kill_engine=True) == 1, log.read_text()
    assert "noria: error: the engine has ended: its process was killed by SIGKILL" in log.read_text()
    assert interrupt(args, target, log, kill_engine=False) == 130, log.read_text()
    assert "interrupted; the same command goes on from here" in log.read_text()
    first = target.read_text()
    target.write_text(first + '{"id": "batch_req_x", "custom_')  # as a power failure would leave it
    outcome = noria(*args)
    assert outcome.status == 0, outcome.err
    assert f"{COUNT:,} lines, {first.count(chr(10))} of them have a result already" in outcome.err
    assert "output tokens/s" in outcome.err
    assert target.read_text().startswith(first)
    results = {found["custom_id"]: found for found in map(json.loads, target.read_text().splitlines())}
    assert len(target.read_text().splitlines()) == len(results) == COUNT
    for name, found in results.items():
        body = found["response"]["body"]
        assert (found["response"]["status_code"], found["error"]) == (200, None)
        assert body["usage"]["completion_tokens"] == 40
        assert body["model"] == "wheel"
        assert body["object"] == ("chat.completion" if int(name[1:]) % 2 else "text_completion")
    again = noria(*args)
    assert again.status == 0
    assert "programs ready" not in again.err  # nothing is left to do, so no engine is started


def test_lines_that_fail_make_the_status_1(noria: Noria, chat_model: str, small: list[str], tmp_path: Path) -> None:
    other_model = {**line(2), "body": {**line(2)["body"], "model": "another"}}
    source = write(tmp_path / "in", [line(1), "{broken\n", other_model])
    args = ["batch", str(source), str(tmp_path / "out"), "--model", chat_model, "--served-model-name", "wheel", *small]
    outcome = noria(*args, "--max-concurrency", "1")
    assert outcome.status == 1
    assert "1 answered, 2 failed" in outcome.err
    assert f"2 of 3 results in {tmp_path / 'out'} are errors" in outcome.err
    answered, broken, unknown = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert answered["response"]["status_code"] == 200
    assert (broken["custom_id"], broken["error"]["code"]) == (None, "invalid_line")
    assert unknown["response"]["status_code"] == 404
    assert "the model 'another' does not exist here; there is wheel" in unknown["response"]["body"]["error"]["message"]
    again = noria(*args)
    assert again.status == 1  # what failed stays failed
    assert "2 of 3 results" in again.err


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([line(1), line(2), line(1)], [], "line 3 has the custom_id of line 1; every line needs one of its own"),
        ([line(1)], ["--max-concurrency", "0"], "--max-concurrency must be at least 1, not 0"),
        ([line(1)], ["--served-model-name", ""], "--served-model-name must not be empty"),
        ([line(1)], ["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        ([line(1)], ["--port", "1"], "unknown option --port"),
        ([line(1)], [], "no model 'no-such-model'"),
    ],
)
def test_what_is_refused_at_once(
    noria: Noria, tmp_path: Path, lines: list[Any], options: list[str], message: str
) -> None:
    source = write(tmp_path / "in", lines)
    assert message in noria("batch", str(source), str(tmp_path / "out"), "--model", "no-such-model", *options).error()
    assert not (tmp_path / "out").exists()


def test_missing_arguments(noria: Noria, tmp_path: Path) -> None:
    assert "--model is missing" in noria("batch", "in", "out").error()
    assert "is missing" in noria("batch", "--model", "m", "in").error()
    assert "cannot be read: No such file" in noria("batch", str(tmp_path / "in"), "out", "--model", "m").error()
