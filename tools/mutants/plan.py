"""The tests of a module: first those of its own name, then the listed ones, quick ones first."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.mutants.sites import Site

__all__ = ["tests_of"]

_FORMATS: Final = "tests/formats/test_"


def _some(*names: str) -> tuple[str, ...]:
    """Files of the engine's rooms (not of the command's, which has a `log`, too): ``log``, ``agent/test_saving``."""
    return tuple(f"tests/{name}.py" if "/" in name else f"tests/[!c]*/test_{name}.py" for name in names)


_REGRESSIONS: Final = (f"{_FORMATS}limits.py", f"{_FORMATS}regressions.py")
_READINGS: Final = ("tests/tools/test_conformance_readings.py",)
_CRASHES: Final = tuple(
    f"tests/tools/test_{name}.py" for name in ("crash_toolbox", "crash_pmem", "powercut", "crash_store")
)
_PLAYED_BACK: Final = ("ckptstore/backends/", "ckptstore/log/", "ckptstore/maintenance/garbage_collection")
"""What the crash tests run. Syncs of other modules concern their own files (exports, a probed disk)."""
_LOG: Final = _some("log", "log_edges", "lost_slots", "replaced", "fold_writer", "pins", "requests", "log_machine")
_STORE: Final = _some("hostile_segments", "store", "deltas*", "diff*", "inspection", "damage")

CONCERNED: Final[Mapping[str, Sequence[str]]] = {
    "formats/history/catalog.py": (
        f"{_FORMATS}catalog.py",
        *_some("lost_slots", "damaged_log"),
        f"{_FORMATS}records.py",
    ),
    "formats/kernel_choice.py": ("tests/maintenance/test_wrong_compiled_kernels.py", f"{_FORMATS}kernel_choice.py"),
    "formats/*compiled*.py": (
        f"{_FORMATS}codecs_exceptions_hostile.py",
        f"{_FORMATS}codecs_kernels.py",
        f"{_FORMATS}optim_compiled.py",
    ),
    "formats/optim/*": (f"{_FORMATS}optim_hostile.py", f"{_FORMATS}optim.py", f"{_FORMATS}optim_arithmetic.py"),
    "formats/segment_files/step_codec.py": _some("diffs", "diff_*"),
    "formats/codecs/delta_sums.py": _some("parallel_chain"),
    "formats/codecs/*": (f"{_FORMATS}codecs_params.py", f"{_FORMATS}codecs_hostile.py", f"{_FORMATS}codecs*.py"),
    "formats/jsontext.py": (f"{_FORMATS}bounds.py", f"{_FORMATS}state.py", *_READINGS),
    "formats/segment_files/segment*.py": (f"{_FORMATS}segment_hostile.py", f"{_FORMATS}segment.py"),
    "formats/segment_files/layout.py": (
        f"{_FORMATS}layout.py",
        f"{_FORMATS}segment_hostile.py",
        f"{_FORMATS}segment.py",
    ),
    "formats/history/records.py": (f"{_FORMATS}record_text_hostile.py", f"{_FORMATS}records.py"),
    "formats/states/tree.py": (f"{_FORMATS}state.py", "tests/tools/test_conformance_page.py"),
    "formats/states/tree_union.py": (f"{_FORMATS}rank_trees.py", f"{_FORMATS}keys.py"),
    "formats/states/keys.py": (f"{_FORMATS}keys.py",),
    **{
        f"formats/states/{name}.py": (f"{_FORMATS}state_objects.py", f"{_FORMATS}golden_objects.py")
        for name in ("numpy_objects", "object_parts")
    },
    "formats/states/values.py": (f"{_FORMATS}state.py",),
    "formats/sources.py": (f"{_FORMATS}sources.py", f"{_FORMATS}state.py"),
    "formats/states/names.py": (f"{_FORMATS}names.py", f"{_FORMATS}state.py"),
    "formats/history/members.py": (
        f"{_FORMATS}record_text_hostile.py",
        f"{_FORMATS}records.py",
        f"{_FORMATS}segment_hostile.py",
    ),
    "formats/history/record_text.py": (f"{_FORMATS}records.py", f"{_FORMATS}catalog.py", *_READINGS),
    "formats/history/fold*.py": (
        f"{_FORMATS}folds_hostile.py",
        f"{_FORMATS}bounds.py",
        f"{_FORMATS}catalog.py",
        f"{_FORMATS}tables.py",
    ),
    "formats/history/columns.py": (f"{_FORMATS}tables.py", f"{_FORMATS}catalog.py"),
    "formats/history/commit_checks.py": (f"{_FORMATS}catalog.py", f"{_FORMATS}records.py"),
    "formats/*.py": (f"{_FORMATS}records.py", f"{_FORMATS}catalog.py", f"{_FORMATS}layout.py", f"{_FORMATS}dtypes.py"),
    **{
        f"ckptstore/backends/{name}.py": _some(
            "object_options", "objects", "objects_store", "bandwidth", "mute_server", "object_faults"
        )
        for name in ("object_store/object_requests", "object_store/object_segments", "object_store/objects", "gathered")
    },
    "ckptstore/backends/object_store/object_options.py": _some("object_options"),
    "ckptstore/backends/fsspec_files.py": _some("fsspec_files"),
    "ckptstore/backends/schemes.py": _some("backends", "third_party"),
    "ckptstore/backends/store_names.py": _some("backends/test_backends", "tiers/test_tiers"),
    "ckptstore/backends/sharing.py": _some("backends/test_sharing", "failed_in_flight", "space"),
    "ckptstore/backends/memory.py": _some("backends", "segments/test_plain_segments", "hostile_segments"),
    "ckptstore/backends/*pmem*.py": (*_some("pmem"), "tests/tools/test_crash_pmem.py", *_some("direct", "backends")),
    "ckptstore/backends/local_disk/folders.py": (
        *_some("local_backend", "replaced", "hostile_keys", "backends"),
        *_CRASHES,
    ),
    "ckptstore/backends/local_disk/directio.py": (
        *_some("local_backend", "backends", "recycling", "direct"),
        *_CRASHES,
    ),
    "ckptstore/backends/*": (*_some("recycling", "space", "local_backend", "backends"), *_CRASHES),
    "ckptstore/agent/client/inherited_state.py": _some("handover"),
    "ckptstore/agent/client/agent_link.py": _some(
        "agent/test_stopped", "protocol", "agent/test_saving", "agent/test_rank_agents"
    ),
    "ckptstore/agent/client/open_agent_writer.py": _some("handover", "agent/test_stopped", "agent/test_rank_agents"),
    **{
        f"ckptstore/agent/{name}.py": _some("protocol", "handover", "saving")
        for name in ("process", "server/trainer_session")
    },
    **{
        f"ckptstore/agent/server/{name}.py": _some("agent/test_rank_agents", "handover")
        for name in ("socket_mailbox", "shutdown_wait", "rank_saves", "rank_keeper")
    },
    **{
        f"ckptstore/agent/{name}.py": _some("agent/test_device_copies", "agent/test_saving", "handover", "protocol")
        for name in ("client/state_transfer", "client/agent_term", "client/buffer_client", "server/shared_buffers")
    },
    **{
        f"ckptstore/write/ranks/{name}.py": _some(
            "rank_device_copies", "ranks", "rank_replicas", "rank_diffs", "rank_memory"
        )
        for name in ("shares", "share_snapshot", "share_writer", "rank_save")
    },
    "ckptstore/agent/client/agent_rendezvous.py": _some("agent/test_rank_agents", "handover"),
    "ckptstore/agent/*": _some("agent/test_saving", "handover", "protocol", "place"),
    "ckptstore/doctor/*": _some("doctor"),
    "ckptstore/following/publisher.py": _some("publishing", "publish_powercut"),
    "ckptstore/following/publish_target.py": _some("publishing", "publish_powercut"),
    "ckptstore/following/version_writer.py": _some("publishing"),
    "ckptstore/following/manifests.py": _some("publishing"),
    "ckptstore/exchange/weight_files.py": _some("weight_files", "import_files"),
    "ckptstore/exchange/safetensors_files.py": _some("weight_files"),
    "ckptstore/exchange/checkpoint_folders.py": _some("checkpoint_folders"),
    "ckptstore/exchange/export.py": _some("export"),
    "ckptstore/exchange/atomic_files.py": _some("export", "outside_attack"),
    "ckptstore/host/buffers.py": _some(
        "torch_offload", "arenas", "segments/test_plain_segments", "pace", "host/test_memory"
    ),
    "ckptstore/host/interpreter_exit.py": _some("host/test_interpreter_exit"),
    "ckptstore/host/processes.py": _some("host/test_processes"),
    "ckptstore/host/sigterm.py": _some("host/test_sigterm", "diffs_review", "diff_kills"),
    "ckptstore/frameworks/pickled_arrays.py": _some("weight_files", "torch_archive"),
    "ckptstore/frameworks/torch_files.py": _some("weight_files", "pickled_arrays", "torch_archive"),
    "ckptstore/frameworks/*": _some("torch_*"),
    **{
        f"ckptstore/training/{name}.py": _some("refused_states", "checkpointer", "planned_state", "topk")
        for name in ("capture/script_state", "checkpointer", "open_term", "state_saves", "step_saves")
    },
    **{
        f"ckptstore/training/{name}.py": _some("changed_loaders", "training/test_loaders", "refused_states")
        for name in (
            "loaders/counted_batches",
            "loaders/loader_facts",
            "loaders/loader_plans",
            "loaders/rest_of_epoch",
            "rng",
        )
    },
    "ckptstore/training/loaders/loader_contents.py": _some("loader_contents", "changed_loaders"),
    **{
        f"ckptstore/training/resume/{name}.py": _some("resume_changes", "checkpointer", "resume_properties")
        for name in ("module_fit", "optimizer_fit", "parameter_match", "part_fit", "resume_checks", "schedules")
    },
    "ckptstore/training/loaders/prepared_batches.py": ("tests/integrations/test_accelerate.py",),
    "ckptstore/training/layerwise/*": _some("layerwise"),
    "ckptstore/training/replica/*": _some("sparse_replica", "checkpointer_replica", "device_replica"),
    "ckptstore/training/optimizers/queued_entries.py": _some("topk", "sparse_replica", "device_replica"),
    "ckptstore/training/optimizers/*": _some("topk", "planned_state", "torch_optimizers", "checkpointer"),
    "ckptstore/training/retention.py": _some("rules_beside_a_run", "checkpointer"),
    "ckptstore/training/save_reports.py": _some("slow_saves", "checkpointer"),
    "ckptstore/training/settings.py": _some("checkpointer", "checkpointer_replica", "save_pace"),
    "ckptstore/training/*": _some("planned_state", "torch_optimizers", "checkpointer"),
    "ckptstore/maintenance/merge/*": _some(
        "diff_merge", "merging_diffs", "hostile_segments", "compaction", "rebuilding"
    ),
    "ckptstore/maintenance/verify/*": (
        *_some("verification", "crafted_stores", "damage", "verifying_one"),
        "tests/cli/test_verify.py",
    ),
    "ckptstore/maintenance/compact/*": (
        *_some("lost_ends", "compaction", "compact_planning"),
        "tests/cli/test_compact.py",
        *_some("compact_kills"),
    ),
    "ckptstore/maintenance/copies/*": (
        *_some("room_for_copies", "lost_ends", "store_copy", "store_repair"),
        "tests/cli/test_copy_and_repair.py",
        *_some("tiers/test_tiers"),
    ),
    "ckptstore/maintenance/repair/*": (*_some("store_repair", "rebuilding"), "tests/cli/test_copy_and_repair.py"),
    "ckptstore/maintenance/pruning.py": (*_some("lost_ends"), "tests/cli/test_prune.py", *_some("prune_kills")),
    "ckptstore/maintenance/garbage_collection.py": ("tests/cli/test_gc.py", *_some("recycling"), *_LOG),
    **{
        f"ckptstore/maintenance/{name}.py": (*_some("tags_and_retirement", "read_once"), "tests/cli/test_tag.py")
        for name in ("catalog_changes", "retirement", "tags")
    },
    **{
        f"ckptstore/log/{name}.py": _some("partial_objects", "staged_units", "damaged_log")
        for name in ("partial_objects", "damage_warnings")
    },
    "ckptstore/log/stale_listings.py": _some("maintenance/test_verification", "maintenance/test_garbage_collection"),
    "ckptstore/log/log_watch.py": _some("following/test_following", "partial_objects", "staged_units", "replaced"),
    "ckptstore/log/log_copy.py": _some(
        "partial_objects", "staged_units", "store_copy", "copies_at_once", "tiers/test_tiers"
    ),
    **{
        f"ckptstore/log/{name}.py": (*_LOG, *_some("partial_objects", "staged_units", "read_once"))
        for name in ("term", "log_reader")
    },
    "ckptstore/log/change_committer.py": (*_LOG, *_some("read_once", "tags_and_retirement")),
    "ckptstore/log/pins.py": (*_LOG, "tests/maintenance/test_garbage_collection.py"),
    "ckptstore/log/*": _LOG,
    "ckptstore/write/ranks/messages/silent_ranks.py": _some("failed_in_flight"),
    "ckptstore/write/ranks/messages/key_value_store.py": _some("rank_mailbox", "ranks"),
    "ckptstore/write/ranks/*": _some(
        "rank_letters",
        "rank_fences",
        "ranks",
        "rank_union",
        "rank_in_flight",
        "rank_rollback",
        "rank_diffs",
        "rank_retention",
        "rank_processes",
    ),
    "ckptstore/write/capture/layerwise_save.py": _some("direct", "agent/test_saving"),
    "ckptstore/write/capture/unit_copy.py": _some("write/test_memory", "concurrent", "rank_memory", "torch_offload"),
    "ckptstore/write/capture/bounded_capture.py": _some("write/test_memory", "rank_memory"),
    "ckptstore/write/capture/layer_copies.py": _some("layerwise_save", "direct", "agent/test_saving"),
    "ckptstore/write/save_calls.py": _some("writer", "layerwise_save", "reentrance", "diff_batches", "concurrent"),
    "ckptstore/write/saves/job.py": _some("concurrent*", "writer", "layerwise_save", "diffs", "deltas*"),
    **{
        f"ckptstore/write/{name}.py": _some("concurrent*", "failed_in_flight", "writer", "write/test_memory")
        for name in ("stage", "save_path")
    },
    "ckptstore/write/full_saves.py": _some(
        "write/test_memory", "concurrent", "writer", "layerwise_save", "torch_offload"
    ),
    **{
        f"ckptstore/write/{name}.py": _some(
            "torch_offload",
            "device_copies",
            "rank_device_copies",
            "layerwise_save",
            "writer",
            "reentrance",
            "diffs",
            "deltas*",
        )
        for name in ("compressed_saves", "capture/snapshot")
    },
    **{
        f"ckptstore/write/{name}.py": _some("order_policy", "deltas*", "write/test_ranks", "rank_diffs")
        for name in ("policy/order_policy", "policy/orders", "resident_bases", "deltas")
    },
    "ckptstore/write/retainer.py": _some("kept_fulls", "pruning", "rank_retention"),
    "ckptstore/write/commits.py": _some("writer", "labels", "tags_and_retirement", "replaced"),
    **{f"ckptstore/write/{name}.py": _some("failed_in_flight") for name in ("saves/lost_steps", "saves/in_flight")},
    "ckptstore/write/steps/unexplained_bytes.py": _some("unexplained_steps"),
    "ckptstore/write/writer_options.py": _some("write/test_memory", "misuse", "writer"),
    **{
        f"ckptstore/write/{name}.py": _some(
            "writer", "rollback", "fold_writer_beside", "reentrance", "diffs", "write/test_memory", "store", "deltas*"
        )
        for name in ("writer", "committer", "saves/ledger")
    },
    "ckptstore/write/writer_opening.py": _some("warnings_as_errors", "writer", "rollback", "diffs", "misuse"),
    **{
        f"ckptstore/{name}.py": _some("diff_damage", "hostile_segments", "diffs", "crafted_stores")
        for name in ("restore/chains/replay", "restore/chains/chain_link", "write/steps/*")
    },
    "ckptstore/restore/chains/assembly.py": _some(
        "crafted_stores", "diff_damage", "hostile_segments", "diffs", "fallback"
    ),
    "ckptstore/restore/chains/chain.py": _some("damage", "deltas*", "diff_damage", "parallel_chain", "shards"),
    "ckptstore/restore/resident_checkpoint.py": _some("following", "handover"),
    "ckptstore/restore/stored_parts.py": _some("shards", "shards_in_use"),
    "ckptstore/restore/restore_plan.py": (*_some("store"), *_LOG),
    "ckptstore/restore/stored_base.py": _some("hostile_segments", "shards", "deltas*", "diff_merge"),
    **{
        f"ckptstore/restore/{name}.py": _some("store", "torch_tensors", "tied_selection", "diffs")
        for name in ("load", "load_targets")
    },
    "ckptstore/restore/fallback.py": _some("fallback", "conformance_page"),
    "ckptstore/restore/alternatives.py": _some("fallback", "verify_and_load"),
    "ckptstore/restore/trial_restore.py": _some("verify_and_load"),
    "ckptstore/restore/open_checkpoint.py": (
        *_some("hostile_segments", "crafted_stores"),
        *_READINGS,
        *_some("damage", "fallback"),
    ),
    "ckptstore/segments/staged_units.py": _some("torch_offload", "concurrent", "failed_in_flight", "write/test_memory"),
    "ckptstore/segments/plain_segments.py": _some("space"),
    "ckptstore/segments/segment_reader.py": _some("damage", "hostile_segments", "store", "diff*"),
    "ckptstore/tiers/remote_check.py": _some("remote_lost"),
    "ckptstore/tiers/*": _some("room_for_copies", "lost_ends", "tiers/test_tiers", "sync", "remote_lost"),
    "ckptstore/store*": (*_some("store", "store_methods"), *_some("tiers/test_tiers", "sync")),
    "ckptstore/*": _STORE,
}
"""Pattern of a module -> patterns of test files; the first match counts. A test checks that each finds something."""


def tests_of(site: Site, root: Path) -> list[str]:
    """Test files that may notice that this check is missing, relative to `root`, in the order to run them."""
    rules = next((tests for pattern, tests in CONCERNED.items() if fnmatch.fnmatch(site.path, pattern)), ())
    stem = Path(site.path).stem
    room = "formats" if site.path.startswith("formats/") else Path(Path(site.path).parts[1]).stem
    own = [f"tests/{room}/test_{stem}{more}.py" for more in ("_hostile", "", "_*")]
    crashes = _CRASHES if site.kind == "durability" and site.path.startswith(_PLAYED_BACK) else ()
    found: dict[str, None] = {}
    regressions = _REGRESSIONS if site.path.startswith("formats/") or "weight_files" in site.path else ()
    for pattern in (*own, *crashes, *rules, *regressions):
        found |= dict.fromkeys(path.relative_to(root).as_posix() for path in sorted(root.glob(pattern)))
    return list(found)
