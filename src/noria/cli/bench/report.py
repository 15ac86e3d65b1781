"""What `noria bench serve` prints of its runs: tables for people, or JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from noria.bench.figures import figures
from noria.bench.load import Load, Run
from noria.cli.bench.printer import Printer
from noria.cli.display import note

if TYPE_CHECKING:
    from noria.cli.bench.serve_options import Plan

_BUSY = 0.7  # of a core: from here on the client may be what is measured
_SWEEP_WIDTHS = (14, 6, 6, 8, 9, 9, 9)


class Report:
    def __init__(self, asked: Plan, model: str) -> None:
        self._asked = asked
        self._model = model
        self._title = f"{model} at {asked.base_url}{asked.endpoint}"
        self._is_sweep = len(asked.loads) > 1
        columns = [name for metric in asked.metrics for name in (f"{metric} p50", f"{metric} p99")]
        good = ["good/s"] if asked.goals else []
        self._rows = Printer(
            False,
            ("load", "done", "failed", "s", "req/s", "out tok/s", "tok/s", *good, *columns),
            (*_SWEEP_WIDTHS, *[9] * len([*good, *columns])),
        )

    def begin(self) -> None:
        note(f"{self._title}: {self._asked.num_prompts} requests{' each' if self._is_sweep else ''}")

    def show(self, load: Load, run: Run) -> dict[str, Any]:
        """Prints one run. Returns its figures, named as in the JSON of vllm bench serve."""
        asked = self._asked
        result = {
            "engine": "server",
            "bench": "serve",
            "model_id": self._model,
            "num_prompts": len(run.records),
            "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
            "burstiness": load.burstiness,
            "max_concurrency": load.max_concurrency,
            **figures(run, asked.percentiles, asked.metrics, asked.goals),
        }
        if asked.json:
            print(json.dumps(result, allow_nan=False), flush=True)
        elif self._is_sweep:
            self._rows.line(result, self._cells(load, run, result))
        else:
            self._table(load, result)
        self._warn(run, result)
        return result

    def picture(self, runs: Sequence[Run], results: Sequence[Mapping[str, Any]]) -> str:
        """SVG."""
        from noria.bench.pictures import curve, spread

        if self._is_sweep:
            return curve(self._title, runs, results, self._asked.metrics)
        return spread(f"{self._title}, {runs[0].load}", runs[0], self._asked.metrics)

    def _cells(self, load: Load, run: Run, result: Mapping[str, Any]) -> list[object]:
        full = figures(run, (99,), self._asked.metrics)
        latencies = [full[f"{each}_{metric}_ms"] for metric in self._asked.metrics for each in ("median", "p99")]
        good = [_number(result["request_goodput"], 2)] if self._asked.goals else []
        name = f"{load.request_rate:g}/s" if math.isfinite(load.request_rate) else f"{load.max_concurrency or 'all'}"
        return [
            *(name, result["completed"], result["failed"], _number(result["duration"], 1)),
            *(_number(result["request_throughput"], 2), _number(result["output_throughput"], 1)),
            *(_number(result["total_token_throughput"], 1), *good),
            *(_number(value, 1) for value in latencies),
        ]

    def _table(self, load: Load, result: Mapping[str, Any]) -> None:
        asked = self._asked
        cached = f", {result['cached_tokens']:,} of them cached" if result["cached_tokens"] else ""
        lines = [
            f"{load}: {result['completed']} done, {result['failed']} failed, {result['duration']:.2f} s",
            f"tokens             {result['total_input_tokens']:,} in{cached}, {result['total_output_tokens']:,} out",
            f"requests/s         {_number(result['request_throughput'], 2)}",
            f"output tokens/s    {_number(result['output_throughput'], 1)}",
            f"all tokens/s       {_number(result['total_token_throughput'], 1)}",
        ]
        if asked.goals:
            goals = ", ".join(f"{name} <= {most:g} ms" for name, most in asked.goals.items())
            share = f"{100 * result['goodput_share']:.1f}%"
            lines.append(f"goodput            {_number(result['request_goodput'], 2)} requests/s, {share} ({goals})")
        print("\n".join(lines), flush=True)
        names = ("mean", "median", *(f"p{each:g}" for each in asked.percentiles))
        table = Printer(False, ("milliseconds", *names), (20, *[10] * len(names)))
        for metric in asked.metrics:
            table.line({}, [metric, *(_number(result[f"{name}_{metric}_ms"], 2) for name in names)])

    def _warn(self, run: Run, result: Mapping[str, Any]) -> None:
        """What throws doubt on the figures."""
        for kind, count in result["errors"].items():
            detail = next(record.detail for record in run.records if record.error == kind)
            note(f"{count} failed, {kind}: {detail}" if detail else f"{count} failed, {kind}")
        if run.cpu_share > _BUSY:
            note(f"this client used {100 * run.cpu_share:.0f}% of a core, so it may be what was measured")
        elif not self._asked.json:
            late = f", requests were at most {1e3 * run.late_s:.1f} ms late" if run.late_s else ""
            note(f"this client used {100 * run.cpu_share:.0f}% of a core{late}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
