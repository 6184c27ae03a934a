"""The demo's printed report: the runs, the losses, the cost of saving, and the verdict."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tools.demo.config import DemoConfig
from tools.demo.corpus import Corpus
from tools.demo.outcome import Outcome
from tools.demo.output import OutputFolder
from tools.demo.supervisor import Strike


def introduce(console: Console, config: DemoConfig, corpus: Corpus, store: Path) -> None:
    """Print what is about to happen."""
    console.print(
        f"A GPT of {config.parameters:,} parameters learns {corpus.text.size // 1024} KiB of Python's own library "
        f"(SHA-256 {corpus.sha256[:12]}) for {config.steps} steps: once without a store, once with a checkpoint of "
        f"every step in {store} and {config.kills} kills. Both must end in the same bits.",
        highlight=False,
    )


def conclude(console: Console, outcome: Outcome, out: OutputFolder) -> None:
    """Print all tables, the verdict, and what to try next."""
    for table in (_kills(outcome.strikes), _saving(outcome), _parts(outcome)):
        console.print(table)
    _print_totals(console, outcome)
    failures = outcome.failures()
    for failure in failures:
        console.print(f"[red]differs[/] {failure}", highlight=False)
    if failures:
        console.print("[bold red]NOT bit-identical[/]")
    else:
        console.print(
            f"[bold green]bit-identical[/]: {sum(part.bits for part in outcome.checks.parts):,} bits compared after "
            f"{len(outcome.strikes)} kills",
            highlight=False,
        )
    console.print(f"\npicture {out.plot}\nnumbers {out.summary}\nTry:", highlight=False)
    middle = outcome.checks.restored[len(outcome.checks.restored) // 2].ref if outcome.checks.restored else "latest"
    step = middle.partition("@")[0]
    for command in (
        f"ckpt log {out.store}",
        f"ckpt inspect {out.store} {middle} --tensor model.tokens.weight",
        f"ckpt diff {out.store} {middle} latest",
        f"ckpt restore {out.store} {step} --out {out.root / f'step-{step}.safetensors'}",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)


def _kills(strikes: list[Strike]) -> Table:
    table = Table(
        "#",
        "how",
        "while",
        "saved",
        "resumed",
        "lost",
        "start",
        "restore",
        "restart",
        title="Kills",
        title_justify="left",
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for strike in strikes:
        table.add_row(
            str(strike.number),
            _how(strike),
            strike.doing,
            str(strike.acknowledged),
            str(strike.resumed),
            str(strike.lost),
            f"{strike.build_seconds:.1f} s",
            f"{strike.restore_seconds:.1f} s",
            f"{strike.restart_seconds:.1f} s",
        )
    return table


def _how(strike: Strike) -> str:
    """``before-create``, a point inside a commit, or the time of the kill."""
    return strike.kill.point.split(".")[-1] if strike.kill.point else f"random, {strike.at:.1f} s"


def _saving(outcome: Outcome) -> Table:
    table = Table(
        "mode", "saves", "size", "durable", "GB/s", "stall", "share", "step", "no store",
        title="Saving (medians per checkpoint)", title_justify="left",
        box=SIMPLE, collapse_padding=True, pad_edge=False,
    )  # fmt: skip
    for costs in outcome.costs:
        table.add_row(
            costs.mode,
            str(costs.checkpoints),
            f"{costs.stored / 1e6:.1f} MB",
            f"{costs.durable_seconds * 1e3:.3g} ms",
            f"{costs.bytes_per_second / 1e9:.1f}",
            f"{costs.stall_seconds * 1e3:.3g} ms",
            f"{costs.stall_share:.0%}",
            f"{costs.step_seconds * 1e3:.3g} ms",
            f"{costs.baseline_seconds * 1e3:.3g} ms",
        )
    return table


def _parts(outcome: Outcome) -> Table:
    table = Table(
        "part",
        "values",
        "bits",
        "differing bits",
        "",
        title=f"Step {outcome.config.steps} against the uninterrupted run",
        title_justify="left",
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for part in outcome.checks.parts:
        verdict = "[green]identical[/]" if part.same else f"[red]differs[/] from {part.first}"
        table.add_row(part.part, f"{part.values:,}", f"{part.bits:,}", f"{part.differing_bits:,}", verdict)
    return table


def _print_totals(console: Console, outcome: Outcome) -> None:
    checks = outcome.checks
    good = sum(not step.differing_parts for step in checks.restored)
    lines = [
        f"store: {checks.checkpoints} checkpoints of {checks.tensors} tensors in {checks.terms} terms, "
        f"{outcome.store_bytes / 1e9:.2f} GB",
    ]
    if "gradient" in checks.stored and "full" in checks.stored:
        diff, full = checks.stored["gradient"], checks.stored["full"]
        lines.append(
            f"bytes per step: {diff / 1e6:.2f} MB as a step diff, {full / 1e6:.2f} MB as a full: "
            f"{diff / full:.0%} of it"
        )
    if checks.restored:
        rate = statistics.median(step.nbytes / step.seconds for step in checks.restored) / 1e9
        lines.append(
            f"restored and compared: {good} of {len(checks.restored)} earlier steps identical, {rate:.2f} GB/s"
        )
    if outcome.recomputed:
        same = sum(len(set(losses)) == 1 for losses in outcome.recomputed.values())
        lines.append(
            f"computed again after a kill: {_steps(len(outcome.recomputed))}, {same} with the same loss as before"
        )
    lines.append(
        f"loss {outcome.final_loss:.4f} nats per byte; {outcome.reference_seconds:.1f} s uninterrupted and "
        f"without a store, {outcome.run_seconds:.1f} s with kills and restarts"
    )
    for line in lines:
        console.print(line, highlight=False)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
