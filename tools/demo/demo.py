"""Runs the phases: reference run, the run through the store with its kills, comparison, picture, summary."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import ckptstore
from tools.demo import checking, report
from tools.demo.config import DemoConfig
from tools.demo.corpus import read_corpus
from tools.demo.events import Event
from tools.demo.killing import Kill, plan_kills
from tools.demo.outcome import Outcome
from tools.demo.output import OutputFolder
from tools.demo.reference import Reference
from tools.demo.save_costs import losses_of, save_costs
from tools.demo.supervisor import Attempt, DemoError, Supervisor, run_with_kills, strikes


class Demo:
    """One run of the demo into one folder."""

    def __init__(self, config: DemoConfig, out: OutputFolder, console: Console) -> None:
        self._config = config
        self._out = out
        self._console = console
        self._warnings: list[str] = []

    def run(self) -> Outcome:
        """Run everything, with progress bars. Raises `DemoError` if a worker ends other than by a planned kill."""
        self._out.prepare(self._config)
        report.introduce(self._console, self._config, read_corpus(self._config.corpus_bytes), self._out.store)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            reference, attempts = self._run_both(progress)
            checks = self._check(progress)
        outcome = self._judge(reference, attempts, checks)
        from tools.demo import plotting  # matplotlib takes a second to import: after the work, not before

        plotting.draw(self._out.plot, reference, attempts, outcome.strikes, not outcome.failures())
        self._out.summary.write_text(json.dumps(outcome.to_json(), indent=2) + "\n")
        return outcome

    def _run_both(self, progress: Progress) -> tuple[Attempt, list[Attempt]]:
        if not self._config.side_by_side:
            return self._run_reference(progress), self._run_through_store(progress)
        with ThreadPoolExecutor(1) as beside:
            reference = beside.submit(self._run_reference, progress)
            attempts = self._run_through_store(progress)
            return reference.result(), attempts

    def _run_reference(self, progress: Progress) -> Attempt:
        task = progress.add_task("uninterrupted run, no store", total=self._config.steps)
        return self._supervisor(progress, task).run("reference", self._out.reference)

    def _run_through_store(self, progress: Progress) -> list[Attempt]:
        config = self._config
        task = progress.add_task("run through the store", total=config.steps)
        plan = plan_kills(config.seed, steps=config.steps, kills=config.kills, in_commit=config.kills_in_commit)

        def announce(kill: Kill, attempt: Attempt) -> None:
            progress.console.print(f"[red]SIGKILL[/] {kill.describe()}, while {attempt.doing()}", highlight=False)

        return run_with_kills(self._supervisor(progress, task), self._out.store, plan, self._durable_step, announce)

    def _supervisor(self, progress: Progress, task: TaskID) -> Supervisor:
        def watch(event: Event) -> None:
            if event.kind in ("released", "resumed"):
                progress.update(task, completed=event.fields["step"])
            if event.kind == "resumed" and event.fields["step"]:
                found = f"{event.fields['step']}, continues as term {event.fields['term']} with {event.fields['mode']}"
                progress.console.print(f"[green]resumed[/] the next process finds step {found}", highlight=False)
            if event.kind == "warning":
                self._warnings.append(event.fields["text"])

        return Supervisor(self._out.config, self._out.log, watch)

    def _durable_step(self) -> int:
        """The step from which the next worker will continue; 0 before there is a store."""
        if not self._out.store.exists():
            return 0
        checkpoints = ckptstore.open(str(self._out.store)).checkpoints()
        return max((info.step for info in checkpoints), default=0)

    def _check(self, progress: Progress) -> checking.Checks:
        task = progress.add_task("comparing with it", total=self._config.samples + 1)
        return checking.check(
            ckptstore.open(str(self._out.store)),
            Reference.read(self._out.reference),
            self._config,
            lambda: progress.advance(task),
        )

    def _judge(self, reference: Attempt, attempts: list[Attempt], checks: checking.Checks) -> Outcome:
        self._show_command("log", "-n", "8")
        verify_status = self._show_command("verify")
        expected, computed = losses_of([reference]), losses_of(attempts)
        return Outcome(
            config=self._config,
            checks=checks,
            recomputed={step: expected[step] + losses for step, losses in computed.items() if len(losses) > 1},
            strikes=strikes(attempts),
            costs=save_costs(attempts, reference),
            store_bytes=self._out.store_bytes(),
            reference_seconds=reference.ended - reference.spawned,
            run_seconds=attempts[-1].ended - attempts[0].spawned,
            final_loss=computed[self._config.steps][-1],
            warnings=self._warnings,
            verify_status=verify_status,
        )

    def _show_command(self, name: str, *options: str) -> int:
        """Run ``ckpt NAME STORE`` visibly, as its user would; returns its exit status."""
        found = shutil.which("ckpt", path=str(Path(sys.executable).parent)) or shutil.which("ckpt")
        if found is None:
            raise DemoError("the command ckpt is not installed: pip install -e .")
        arguments = [name, str(self._out.store), *options]
        self._console.print(f"[bold]$ ckpt {' '.join(arguments)}[/]", highlight=False, soft_wrap=True)
        ended = subprocess.run([found, *arguments], stdout=subprocess.PIPE, text=True, check=False)
        self._console.print(ended.stdout, markup=False, highlight=False, soft_wrap=True)
        return ended.returncode
