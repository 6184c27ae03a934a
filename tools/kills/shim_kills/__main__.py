"""SIGKILL of a training script that uses a `Checkpointer`, at random: it ends with the bits of an undisturbed run.

    python -m tools.kills.shim_kills --kills 100
    python -m tools.kills.shim_kills --kills 100 --agent
    python -m tools.kills.shim_kills --kills 100 --agent --strategy replica
    python -m tools.kills.shim_kills --kills 100 --agent --strategy replica --ranks 1 --ranks 2 --compressed
    python -m tools.kills.shim_kills --kills 100 --agent --ranks 2
    python -m tools.kills.shim_kills --kills 100 --fsdp
    python -m tools.kills.shim_kills --kills 100 --every-form --out kills.jsonl
    python -m tools.kills.shim_kills --tally kills.jsonl

Runs each strategy, with one process and with two ranks of DDP (with ``--fsdp``: of FSDP2). After each kill the run
continues in a new process (or group). Then:

- every loss that was ever computed for a step is the loss of the uninterrupted run at that step;
- an acknowledged step is never lost;
- the last state (weights, moments, schedule, scaler, buffers, generators, loader) is the uninterrupted run's, bit for
  bit. The uninterrupted run saves fulls, whatever the strategy of the killed runs.

With ``--agent`` an agent saves, for one process, and the trainer, the agent or both are killed. When only the trainer
is killed, the next life continues from the agent's memory: at most the step in flight is lost. When only the agent is
killed, training continues in the same life. ``replica`` needs an agent, and that memory is then the state that the
agent computed from gradients. With ``--ranks 2`` or ``--fsdp`` each rank has an agent: steps that all agents received
are in the store when the ranks are killed; when an agent is killed, the ranks get an error and end.

The forms take turns, some kills at a time. With ``--out`` the result of each turn is a line of JSON there; the same
command again continues with the missing turns. ``--broken`` takes a checkpointer that is wrong on purpose.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tools.kills.shim_kills.broken import BROKEN
from tools.kills.shim_kills.lives import Job, Start, Violation, cold
from tools.kills.shim_kills.sweeps import Sweeper, Tally
from tools.warm import Warm

__all__ = ["main"]

_STRATEGIES: Final = ("full", "delta", "gradient")
_NOTHING: Final = "every kill came before the first durable step: the run proves nothing"


@dataclass(slots=True)
class Campaign:
    """The turns of a campaign and their results.

    Attributes:
        seed: of all random choices.
        records: the result of each turn.
        out: the file of the results.
    """

    seed: int
    records: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None

    def done(self, job: Job, turn: int) -> bool:
        """Whether the turn's result is there, or a promise was broken in that form."""
        mine = [one for one in self.records if one["form"] == str(job) and one["seed"] == self.seed]
        return any(one["turn"] == turn or one["violation"] for one in mine)

    def note(self, job: Job, turn: int, tally: Tally, violation: str | None) -> None:
        """Add the result of a turn."""
        words = {"form": str(job), "seed": self.seed, "turn": turn, **tally.form(), "violation": violation}
        self.records.append(words)
        if self.out is not None:
            with self.out.open("a") as notes:
                notes.write(json.dumps(words) + "\n")

    def summary(self) -> dict[str, Any]:
        """Each form's turns, added up."""
        forms: dict[str, dict[str, Any]] = {}
        for record in self.records:
            form = forms.setdefault(record["form"], {"total": 0, "kills": Counter(), "violations": []})
            form["kills"].update(record["kills"])
            form["total"] = form["kills"].total()
            for name in ("lives", "resumed", "kept", "ends", "seconds"):
                form[name] = round(form.get(name, 0) + record[name], 1)
            form["violations"] += [record["violation"]] if record["violation"] else []
        for form in forms.values():
            form["kills"] = dict(sorted(form["kills"].items()))
            if not form["resumed"] and not form["violations"]:
                form["violations"].append(_NOTHING)
        total = sum(form["total"] for form in forms.values())
        return {"schema": 1, "seeds": sorted({one["seed"] for one in self.records}), "kills": total, "forms": forms}


def told(form: dict[str, Any]) -> str:
    """The results of a form, in a line."""
    victims = ", ".join(f"{victim} {count}" for victim, count in form["kills"].items())
    kept = f", {form['kept']} from the agent's memory" if form["kept"] else ""
    lives = f"{form['lives']} lives, {form['resumed']} resumed{kept}"
    return f"{sum(form['kills'].values())} kills ({victims}); {lives}; {form['ends']} ends, all bit for bit"


def turns(jobs: Sequence[Job], kills: int, most: int) -> Iterator[tuple[Job, int, int]]:
    """(form, number of its turn, kills)."""
    for number, first in enumerate(range(0, kills, most)):
        for job in jobs:
            yield job, number, min(most, kills - first)


def forms(options: argparse.Namespace) -> list[Job]:
    """The forms that the options select."""
    plain = options.strategy or _STRATEGIES
    agents = options.strategy or (*_STRATEGIES, "replica")
    if options.every_form:
        found = [Job(strategy, ranks) for ranks in (1, 2) for strategy in plain if strategy != "replica"]
        found += [Job(strategy, by_agent=True) for strategy in agents]
        found += [Job(strategy, 2, by_agent=True) for strategy in agents]
    elif options.agent and (options.fsdp or options.ranks):
        ranks = (2,) if options.fsdp else options.ranks
        found = [Job(strategy, count, by_agent=True, sharded=options.fsdp) for count in ranks for strategy in agents]
    elif options.agent:
        found = [Job(strategy, by_agent=True) for strategy in agents]
    elif options.fsdp:
        found = [Job(strategy, 2, sharded=True) for strategy in plain]
    else:
        found = [Job(strategy, ranks) for ranks in options.ranks or (1, 2) for strategy in plain]
    return [replace(one, compressed=options.compressed, broken=options.broken) for one in found]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each form")
    parser.add_argument("--strategy", choices=(*_STRATEGIES, "replica"), action="append")
    parser.add_argument("--ranks", type=int, choices=(1, 2), action="append")
    parser.add_argument("--agent", action="store_true", help="an agent saves, and is killed, too")
    parser.add_argument("--fsdp", action="store_true", help="the ranks have shards of the model (two processes)")
    parser.add_argument("--compressed", action="store_true", help="the gradients are compressed (TopKHook)")
    parser.add_argument("--every-form", action="store_true", help="one process, two ranks of DDP; both with agents")
    parser.add_argument("--seed", type=int, help="default: that of --out, or the time")
    parser.add_argument("--turn", type=int, default=10, metavar="KILLS", help="at a time of each form")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="note every turn in this file, and continue after the turns in it"
    )
    parser.add_argument("--tally", type=Path, metavar="FILE", help="print the results in such a file, and kill nothing")
    parser.add_argument(
        "--broken", choices=sorted(BROKEN), help="a checkpointer that is wrong on purpose: this must fail"
    )
    parser.add_argument("--cold", action="store_true", help="start a cold interpreter for each life")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    options = parser.parse_args(arguments)
    if "replica" in (options.strategy or ()) and not (options.agent or options.every_form):
        parser.error("replica needs an agent: add --agent")
    if options.compressed and options.fsdp:
        parser.error("TopKHook does not support shards: omit --fsdp")
    return options


def opened(file: Path | None, seed: int | None) -> Campaign:
    """A campaign that continues with the results in a file."""
    records = [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []
    noted = records[-1]["seed"] if records else int(time.time())
    return Campaign(noted if seed is None else seed, records, file)


def kill(campaign: Campaign, options: argparse.Namespace, start: Start) -> None:
    """Run all missing turns."""
    say = sys.stderr if options.json else sys.stdout
    print(f"seed {campaign.seed}", file=say, flush=True)
    evidence = None if campaign.out is None else campaign.out.with_suffix(".evidence")
    sweeper = Sweeper(start, evidence)
    for job, turn, count in turns(forms(options), options.kills, max(1, options.turn)):
        if campaign.done(job, turn):
            continue
        tally, violation = Tally(), None
        try:
            sweeper.sweep(count, job, f"{campaign.seed} {turn}", tally)
        except Violation as error:
            violation = str(error)
        campaign.note(job, turn, tally, violation)
        form = campaign.summary()["forms"][str(job)]
        line = f"BROKEN: {violation}" if violation else f"{told(form)}; {tally.seconds:.0f} s"
        print(f"{job}: {line}", file=say, flush=True)


@contextlib.contextmanager
def starting(options: argparse.Namespace) -> Iterator[Start]:
    """The function that starts scripts; SIGTERM ends them as well."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.cold:
            yield cold
        else:
            with Warm() as nursery:
                yield nursery.start
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Run the command -> exit status: 0, or 1 if a promise was broken. `start`: starts scripts; None: a new nursery."""
    options = parsed(arguments)
    campaign = opened(options.tally or options.out, options.seed)
    if options.tally is None:
        with contextlib.nullcontext(start) if start is not None else starting(options) as found:
            kill(campaign, options, found)
    summary = campaign.summary()
    if options.json:
        print(json.dumps(summary, indent=1))
    else:
        for name, form in summary["forms"].items():
            print(f"{name}: {told(form)}; {form['seconds']:.0f} s")
            for violation in form["violations"]:
                print(f"BROKEN: {name}: {violation}")
        print(f"{summary['kills']} kills")
    return int(any(form["violations"] for form in summary["forms"].values()))


if __name__ == "__main__":
    sys.exit(main())
