"""What a run of the demo found out: one value, its verdict, and its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tools.demo.checking import Checks
from tools.demo.config import DemoConfig
from tools.demo.save_costs import SaveCosts
from tools.demo.supervisor import Strike


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything `tools.demo.report` prints and ``summary.json`` holds. Times in seconds, sizes in bytes."""

    config: DemoConfig
    checks: Checks
    recomputed: dict[int, list[float]]
    """Losses of the steps that were computed more than once, the reference run's first."""
    strikes: list[Strike]
    costs: list[SaveCosts]
    store_bytes: int
    reference_seconds: float
    run_seconds: float
    final_loss: float
    warnings: list[str]
    verify_status: int

    def failures(self) -> list[str]:
        """Why the demo fails; empty if every promise was kept."""
        found = [
            f"{part.part}: {part.differing_bits} of {part.bits} bits differ in {part.differing_leaves} of "
            f"{part.leaves} leaves, the first is {part.first}"
            for part in self.checks.parts
            if not part.same
        ]
        found += [
            f"step {step.step}: restored as {step.ref}, differs in {', '.join(step.differing_parts)}"
            for step in self.checks.restored
            if step.differing_parts
        ]
        found += [f"step {step} does not have exactly one checkpoint" for step in self.checks.missing]
        found += [
            f"step {step} was computed {len(losses)} times with different losses: {losses}"
            for step, losses in self.recomputed.items()
            if len(set(losses)) != 1
        ]
        found += [broken for strike in self.strikes for broken in strike.broken_promises()]
        found += self.warnings
        if self.verify_status:
            found.append(f"ckpt verify exited with {self.verify_status}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The content of ``summary.json``: times in seconds, sizes in bytes."""
        failures = self.failures()
        return {
            "identical": not failures,
            "failures": failures,
            "config": asdict(self.config),
            "corpus": self.checks.corpus,
            "environment": self.checks.environment,
            "parts": [asdict(part) for part in self.checks.parts],
            "restored_steps": [asdict(step) for step in self.checks.restored],
            "recomputed_steps": {str(step): losses for step, losses in self.recomputed.items()},
            "kills": [{**asdict(strike), "lost": strike.lost} for strike in self.strikes],
            "saving": [
                {
                    **asdict(costs),
                    "bytes_per_second": costs.bytes_per_second,
                    "stall_share": costs.stall_share,
                    "loss_share": costs.loss_share,
                }
                for costs in self.costs
            ],
            "store": {
                "checkpoints": self.checks.checkpoints,
                "terms": self.checks.terms,
                "tensors": self.checks.tensors,
                "logical_bytes": self.checks.nbytes,
                "bytes": self.store_bytes,
                "bytes_by_kind": self.checks.stored,
            },
            "seconds": {"reference": self.reference_seconds, "run": self.run_seconds},
            "final_loss": self.final_loss,
            "verify_status": self.verify_status,
        }
