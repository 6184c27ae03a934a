"""ckptstore: saves every step of a PyTorch run as a durable, verified checkpoint, and restores it bit for bit.

    ckptstore.save(model.state_dict(), "runs/model")  # for torch.save
    state = ckptstore.load("runs/model")  # for torch.load

    store = ckptstore.open("runs/gpt")
    with store.writer(parent="latest") as writer:
        if writer.parent:
            state = store.load(writer.parent.ref)
        ...
        writer.save(state, step=100)

Importing this package imports nothing else: neither numpy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptstore._version import __version__

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend as Backend
    from ckptstore.backends.costs import Spent as Spent
    from ckptstore.errors import AgentBusyError as AgentBusyError
    from ckptstore.errors import AgentError as AgentError
    from ckptstore.errors import AgentLostError as AgentLostError
    from ckptstore.errors import AgentSilentError as AgentSilentError
    from ckptstore.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from ckptstore.errors import CkptError as CkptError
    from ckptstore.errors import CommitUnknownError as CommitUnknownError
    from ckptstore.errors import CorruptionError as CorruptionError
    from ckptstore.errors import CorruptLogError as CorruptLogError
    from ckptstore.errors import CorruptSegmentError as CorruptSegmentError
    from ckptstore.errors import DivergedReplicasError as DivergedReplicasError
    from ckptstore.errors import FailedRankError as FailedRankError
    from ckptstore.errors import FencedError as FencedError
    from ckptstore.errors import ForeignObjectError as ForeignObjectError
    from ckptstore.errors import FormatError as FormatError
    from ckptstore.errors import IncompatibleFormatError as IncompatibleFormatError
    from ckptstore.errors import KernelError as KernelError
    from ckptstore.errors import KeyExistsError as KeyExistsError
    from ckptstore.errors import KeyNotFoundError as KeyNotFoundError
    from ckptstore.errors import MailboxError as MailboxError
    from ckptstore.errors import MissingDependencyError as MissingDependencyError
    from ckptstore.errors import MissingRankError as MissingRankError
    from ckptstore.errors import NotFoundError as NotFoundError
    from ckptstore.errors import RankError as RankError
    from ckptstore.errors import RankMismatchError as RankMismatchError
    from ckptstore.errors import ReadOnlyError as ReadOnlyError
    from ckptstore.errors import RemoteLostError as RemoteLostError
    from ckptstore.errors import RequestError as RequestError
    from ckptstore.errors import RequestRefusedError as RequestRefusedError
    from ckptstore.errors import RequestTimeoutError as RequestTimeoutError
    from ckptstore.errors import StateMismatchError as StateMismatchError
    from ckptstore.errors import StepOrderError as StepOrderError
    from ckptstore.errors import StorageError as StorageError
    from ckptstore.errors import StoreNotFoundError as StoreNotFoundError
    from ckptstore.errors import StoreReplacedError as StoreReplacedError
    from ckptstore.errors import TensorNotFoundError as TensorNotFoundError
    from ckptstore.errors import UnmadeStateError as UnmadeStateError
    from ckptstore.errors import UnsupportedBackendError as UnsupportedBackendError
    from ckptstore.errors import UnsupportedStateError as UnsupportedStateError
    from ckptstore.errors import UsageError as UsageError
    from ckptstore.errors import WriterClosedError as WriterClosedError
    from ckptstore.errors import WriterError as WriterError
    from ckptstore.exchange.export import ExportResult as ExportResult
    from ckptstore.exchange.import_files import ImportedFile as ImportedFile
    from ckptstore.following.follower import Followed as Followed
    from ckptstore.following.follower import Follower as Follower
    from ckptstore.following.publisher import Published as Published
    from ckptstore.following.publisher import Publisher as Publisher
    from ckptstore.formats.history.records import FormatFile as FormatFile
    from ckptstore.formats.history.records import SegmentEntry as SegmentEntry
    from ckptstore.formats.kernel_choice import KernelWarning as KernelWarning
    from ckptstore.formats.segment_files.segment import SegmentDoc as SegmentDoc
    from ckptstore.formats.segment_files.segment import TensorEntry as TensorEntry
    from ckptstore.formats.states.registered_types import Foreign as Foreign
    from ckptstore.formats.states.registered_types import register as register
    from ckptstore.formats.states.shard import Shard as Shard
    from ckptstore.formats.states.shard import Shards as Shards
    from ckptstore.formats.states.state import FlatState as FlatState
    from ckptstore.frameworks.flat_states import flat_state as flat_state
    from ckptstore.host.caller_warnings import BranchWarning as BranchWarning
    from ckptstore.host.caller_warnings import DamagedLogWarning as DamagedLogWarning
    from ckptstore.host.caller_warnings import DeterminismWarning as DeterminismWarning
    from ckptstore.host.caller_warnings import DivergedReplicasWarning as DivergedReplicasWarning
    from ckptstore.host.caller_warnings import FallbackWarning as FallbackWarning
    from ckptstore.host.caller_warnings import FreshStartWarning as FreshStartWarning
    from ckptstore.host.caller_warnings import HiddenTensorsWarning as HiddenTensorsWarning
    from ckptstore.host.caller_warnings import LossyWarning as LossyWarning
    from ckptstore.host.caller_warnings import LostStepsWarning as LostStepsWarning
    from ckptstore.host.caller_warnings import RemoteWarning as RemoteWarning
    from ckptstore.host.caller_warnings import UnexplainedStepWarning as UnexplainedStepWarning
    from ckptstore.host.caller_warnings import UnpinnedWarning as UnpinnedWarning
    from ckptstore.host.progress import Progress as Progress
    from ckptstore.log.checkpoint_info import CheckpointInfo as CheckpointInfo
    from ckptstore.log.checkpoint_info import TermInfo as TermInfo
    from ckptstore.log.log_reader import View as View
    from ckptstore.maintenance.compact import CompactMove as CompactMove
    from ckptstore.maintenance.compact import CompactReport as CompactReport
    from ckptstore.maintenance.compact.idle_compaction import CompactOptions as CompactOptions
    from ckptstore.maintenance.compact.idle_compaction import CompactPass as CompactPass
    from ckptstore.maintenance.copies import Copied as Copied
    from ckptstore.maintenance.garbage_collection import Collected as Collected
    from ckptstore.maintenance.garbage_collection import Holder as Holder
    from ckptstore.maintenance.merge import Merged as Merged
    from ckptstore.maintenance.merge import RestoreCost as RestoreCost
    from ckptstore.maintenance.pruning import Pruned as Pruned
    from ckptstore.maintenance.repair import Repaired as Repaired
    from ckptstore.maintenance.retirement import Retired as Retired
    from ckptstore.maintenance.verify.verification import VerificationReport as VerificationReport
    from ckptstore.maintenance.verify.verify_findings import Damage as Damage
    from ckptstore.maintenance.verify.verify_findings import Unread as Unread
    from ckptstore.reports.bisection import Bisected as Bisected
    from ckptstore.reports.bisection import Probe as Probe
    from ckptstore.reports.comparison import StateDifference as StateDifference
    from ckptstore.reports.comparison import TensorDifference as TensorDifference
    from ckptstore.reports.inspection import ChainLink as ChainLink
    from ckptstore.reports.inspection import CheckpointDescription as CheckpointDescription
    from ckptstore.reports.inspection import TensorDescription as TensorDescription
    from ckptstore.reports.inspection import TensorStatistics as TensorStatistics
    from ckptstore.reports.lineage import Lineage as Lineage
    from ckptstore.reports.request_costs import RequestCosts as RequestCosts
    from ckptstore.reports.restore_explanation import Explanation as Explanation
    from ckptstore.reports.restore_explanation import PlanStep as PlanStep
    from ckptstore.reports.run_comparison import SideBySide as SideBySide
    from ckptstore.reports.run_status import RunStatus as RunStatus
    from ckptstore.reports.runs import FoundRuns as FoundRuns
    from ckptstore.reports.runs import RunInfo as RunInfo
    from ckptstore.reports.runs import find_runs as find_runs
    from ckptstore.reports.store_stats import ClassBytes as ClassBytes
    from ckptstore.reports.store_stats import Share as Share
    from ckptstore.reports.store_stats import StoreStats as StoreStats
    from ckptstore.restore.mapped_tensors import MappedTensors as MappedTensors
    from ckptstore.restore.restore_plan import Plan as Plan
    from ckptstore.restore.stored_files import StoredFile as StoredFile
    from ckptstore.store import Store as Store
    from ckptstore.store import open as open
    from ckptstore.store import repair as repair
    from ckptstore.store import verify as verify
    from ckptstore.store.drop_in import load as load
    from ckptstore.store.drop_in import save as save
    from ckptstore.tiers.store_sync import Synced as Synced
    from ckptstore.write.capture.layer_copies import LayerCopy as LayerCopy
    from ckptstore.write.capture.layerwise_save import LayeredSave as LayeredSave
    from ckptstore.write.capture.snapshot import Snapshot as Snapshot
    from ckptstore.write.policy.delta_interval import RestoreBound as RestoreBound
    from ckptstore.write.policy.delta_options import DeltaOptions as DeltaOptions
    from ckptstore.write.policy.diff_options import DiffOptions as DiffOptions
    from ckptstore.write.ranks.messages.key_value_store import Group as Group
    from ckptstore.write.ranks.messages.key_value_store import Mailbox as Mailbox
    from ckptstore.write.ranks.rank_options import RankOptions as RankOptions
    from ckptstore.write.ranks.rank_writer import RankWriter as RankWriter
    from ckptstore.write.saves.ledger import PendingSave as PendingSave
    from ckptstore.write.saves.save_metrics import SaveMetrics as SaveMetrics
    from ckptstore.write.second_tier import Lag as Lag
    from ckptstore.write.steps.updates import Update as Update
    from ckptstore.write.writer import Writer as Writer

_HOMES = {
    "backends.base": "Backend",
    "backends.costs": "Spent",
    "errors": (
        "CheckpointNotFoundError CkptError CommitUnknownError CorruptionError CorruptLogError"
        " CorruptSegmentError FencedError ForeignObjectError FormatError IncompatibleFormatError"
        " KeyExistsError KeyNotFoundError MissingDependencyError NotFoundError ReadOnlyError RemoteLostError"
        " RequestError RequestRefusedError RequestTimeoutError StateMismatchError StepOrderError StorageError"
        " StoreNotFoundError"
        " StoreReplacedError TensorNotFoundError UnsupportedBackendError UnsupportedStateError UsageError"
        " WriterClosedError WriterError RankError MissingRankError FailedRankError RankMismatchError"
        " UnmadeStateError DivergedReplicasError MailboxError AgentError AgentLostError AgentBusyError KernelError"
        " AgentSilentError"
    ),
    "exchange.export": "ExportResult",
    "exchange.import_files": "ImportedFile",
    "following.follower": "Followed Follower",
    "following.publisher": "Published Publisher",
    "formats.kernel_choice": "KernelWarning",
    "formats.history.records": "FormatFile SegmentEntry",
    "formats.segment_files.segment": "SegmentDoc TensorEntry",
    "formats.states.registered_types": "Foreign register",
    "formats.states.shard": "Shard Shards",
    "formats.states.state": "FlatState",
    "frameworks.flat_states": "flat_state",
    "host.caller_warnings": (
        "BranchWarning DamagedLogWarning DeterminismWarning DivergedReplicasWarning FallbackWarning FreshStartWarning"
        " HiddenTensorsWarning LossyWarning LostStepsWarning RemoteWarning UnexplainedStepWarning UnpinnedWarning"
    ),
    "host.progress": "Progress",
    "log.checkpoint_info": "CheckpointInfo TermInfo",
    "log.log_reader": "View",
    "maintenance.compact": "CompactMove CompactReport",
    "maintenance.compact.idle_compaction": "CompactOptions CompactPass",
    "maintenance.copies": "Copied",
    "maintenance.garbage_collection": "Collected Holder",
    "maintenance.merge": "Merged RestoreCost",
    "maintenance.pruning": "Pruned",
    "maintenance.repair": "Repaired",
    "maintenance.retirement": "Retired",
    "maintenance.verify.verify_findings": "Damage Unread",
    "maintenance.verify.verification": "VerificationReport",
    "reports.bisection": "Bisected Probe",
    "reports.comparison": "StateDifference TensorDifference",
    "reports.restore_explanation": "Explanation PlanStep",
    "reports.inspection": "ChainLink CheckpointDescription TensorDescription TensorStatistics",
    "reports.lineage": "Lineage",
    "reports.request_costs": "RequestCosts",
    "reports.run_status": "RunStatus",
    "reports.runs": "FoundRuns RunInfo find_runs",
    "reports.run_comparison": "SideBySide",
    "reports.store_stats": "ClassBytes Share StoreStats",
    "restore.mapped_tensors": "MappedTensors",
    "restore.restore_plan": "Plan",
    "restore.stored_files": "StoredFile",
    "store": "Store open repair verify",
    "store.drop_in": "load save",
    "tiers.store_sync": "Synced",
    "write.policy.delta_options": "DeltaOptions",
    "write.capture.layer_copies": "LayerCopy",
    "write.policy.delta_interval": "RestoreBound",
    "write.capture.layerwise_save": "LayeredSave",
    "write.saves.ledger": "PendingSave",
    "write.ranks.messages.key_value_store": "Group Mailbox",
    "write.ranks.rank_options": "RankOptions",
    "write.ranks.rank_writer": "RankWriter",
    "write.saves.save_metrics": "SaveMetrics",
    "write.second_tier": "Lag",
    "write.capture.snapshot": "Snapshot",
    "write.policy.diff_options": "DiffOptions",
    "write.steps.updates": "Update",
    "write.writer": "Writer",
}
"""Module -> its public names, imported when asked for. Type checkers read the imports above; a test compares."""
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604  # strings, every one


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptstore' has no attribute {name!r}")
    value = getattr(import_module(f"ckptstore.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
