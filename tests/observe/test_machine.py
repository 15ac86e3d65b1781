"""The machine's own figures, on sizes that take no time."""

from __future__ import annotations

import subprocess
import sys

from noria.observe import machine


def test_the_processor_has_a_name_and_cores() -> None:
    found = machine.processor()
    assert found.name
    assert found.cores >= 1
    assert found.key == f"{found.name} x {found.cores}"


def test_processor_from_what_the_system_says(monkeypatch) -> None:
    text = "processor\t: 0\nmodel name\t: Wheel 9000\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nmodel name\t: other\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda *_, **__: text)
    found = machine.processor()
    assert found.name == "Wheel 9000"
    assert found.instruction_sets == ("avx2", "fma")


def test_bandwidth_and_products_are_of_the_right_size() -> None:
    assert 1e8 < machine.read_bandwidth(1, 1 << 20) < 1e13

    calls: list[tuple[int, ...]] = []
    rate = machine.product_rate(lambda a, b: calls.append((a @ b).shape), 64)
    assert calls[0] == (64, 64)
    assert 1e6 < rate < 1e14


def test_peak_memory_grows_with_what_is_used() -> None:
    """In a process of its own: the peak of this one may be gigabytes."""
    code = (
        "import numpy as np\n"
        "from noria.observe import machine\n"
        "before = machine.peak_memory_bytes()\n"
        "ballast = np.ones((before + (64 << 20)) // 8)\n"
        "print(before, machine.peak_memory_bytes(), ballast[0])\n"
    )
    before, after, _ = map(float, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert before > 1 << 20
    assert after >= before + (32 << 20)
