"""Sends the numbers of saves to an experiment tracker: TensorBoard, Weights & Biases, MLflow.

::

    with Checkpointer("runs/gpt", model=model, optimizer=optimizer, on_metrics=tracked(wandb_run)) as checkpointer:

No tracker is imported: its object is recognized by its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ckptstore.errors import UsageError
from ckptstore.training.save_reports import curves
from ckptstore.write.saves.save_metrics import OnMetrics, SaveMetrics

__all__ = ["tracked"]

_Send: TypeAlias = Callable[[Mapping[str, float], int], object]
"""Sends numbers by name, and the step."""
_STEP: Final = "step"


def tracked(tracker: Any, *, prefix: str = "ckptstore/", run_id: str | None = None) -> OnMetrics:
    """A function for ``on_metrics=`` that sends the numbers of each save: seconds, bytes, lag.

    The names are those of ``tensorboard=``: ``stall``, ``waited``, ``durable``, ``stored``, ``ratio``, ``in_flight``,
    ``lag``, and ``failed`` (1) for a save that failed.

    Args:
        tracker: a ``SummaryWriter`` of TensorBoard; a run of Weights & Biases; the module `mlflow`, or an
            ``MlflowClient``.
        prefix: begins each name.
        run_id: with MLflow: the run. None: the one that is active now, in this thread. An ``MlflowClient`` needs it.

    Raises:
        UsageError: it is none of these; MLflow has no active run.
    """
    send = _sender(tracker, prefix, run_id)

    def ended(metrics: SaveMetrics) -> None:
        numbers = curves(metrics) | ({} if metrics.error is None else {"failed": 1.0})
        send({f"{prefix}{name}": value for name, value in numbers.items()}, metrics.step)

    return ended


def _sender(tracker: Any, prefix: str, run_id: str | None) -> _Send:
    if _has(tracker, "log_metrics", "active_run"):
        return _mlflow(tracker, run_id)
    if _has(tracker, "log_metric", "log_batch"):
        return _mlflow_client(tracker, run_id)
    if run_id is not None:
        raise UsageError(f"run_id: only MLflow has it, not {_named(tracker)}")
    if _has(tracker, "add_scalar"):
        return _tensorboard(tracker)
    if _has(tracker, "log", "define_metric"):
        return _wandb(tracker, prefix)
    raise UsageError(
        f"{_named(tracker)} is not a known tracker: pass a SummaryWriter (add_scalar), a run of Weights & "
        "Biases (log, define_metric), the module mlflow or an MlflowClient; or write a function for on_metrics="
    )


def _has(tracker: Any, *methods: str) -> bool:
    return not isinstance(tracker, type) and all(callable(getattr(tracker, name, None)) for name in methods)


def _named(tracker: Any) -> str:
    return f"the class {tracker.__name__}" if isinstance(tracker, type) else type(tracker).__name__


def _tensorboard(writer: Any) -> _Send:
    def send(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return send


def _wandb(run: Any, prefix: str) -> _Send:
    # A run has one step, which only increases, and `log(step=)` drops what is older. Saves end later than their steps,
    # so they have an axis of their own.
    axis = f"{prefix}{_STEP}"
    run.define_metric(axis, hidden=True)
    run.define_metric(f"{prefix}*", step_metric=axis)

    def send(numbers: Mapping[str, float], step: int) -> None:
        # Prevents: a step of the run that the script did not take. The numbers are sent with its next log().
        run.log({axis: step, **numbers}, commit=False)

    return send


def _mlflow(module: Any, run_id: str | None) -> _Send:
    if run_id is None:
        # The active run is that of a thread, and saves end in another one: MLflow would begin a run there.
        active = module.active_run()
        if active is None:
            raise UsageError("mlflow has no active run in this thread: call mlflow.start_run() first, or pass run_id=")
        run_id = str(active.info.run_id)
    return lambda numbers, step: module.log_metrics(dict(numbers), step=step, run_id=run_id)


def _mlflow_client(client: Any, run_id: str | None) -> _Send:
    if run_id is None:
        raise UsageError(f"{_named(client)} has no active run: pass run_id=")

    def send(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            client.log_metric(run_id, name, value, step=step)

    return send
