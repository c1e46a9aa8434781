"""The settings with which a training begins or resumes, perhaps on other devices than before."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segapp.chunks import EVEN, SPLIT_NAMES, SplitRequest, replan_shares
from segapp.config.sections import SPLIT_SETTINGS, LiveSettings, RunConfig
from segapp.run.events import Settings, Topology
from segapp.training.context import DeviceLocations
from segapp.training.live.changes import ChangeRecord, Replay, Trial


@dataclass(frozen=True)
class Start:
    """The settings of the first step.

    Attributes:
        record: the settings that hold, and the changes to apply again.
        configured: the settings with the split of the config, with which the network is built, and which hold if the
            devices cannot divide a batch as `record` says.
    """

    record: ChangeRecord
    configured: LiveSettings


def start_of(
    config: RunConfig,
    planned: SplitRequest,
    locations: DeviceLocations,
    state: Mapping[str, Any] | None = None,
    replays: Sequence[Replay] = (),
    reverted: Collection[tuple[int, str | None]] = (),
) -> Start:
    """Return the settings of a training that begins, or that continues from the state of a checkpoint.

    A key that was changed in the config since the checkpoint takes precedence over the setting. On another number of
    devices, and without `parallel.shares` for it, the last split is planned anew per device, also in later resumes with
    that number.

    `planned` is the split of the memory plan, which holds if the config says auto; `replays` are the changes that were
    applied after the checkpoint, and `reverted` are the epochs and commands of the splits that were reverted.
    """
    parallel, num = config.parallel, len(locations.names)
    is_auto, split = parallel.is_auto, planned if parallel.is_auto else parallel.split
    if state is None:
        settings = LiveSettings().with_split(split, is_auto=is_auto)
        return Start(ChangeRecord(settings, replays=tuple(replays)), settings)

    live = state["live"]
    settings, devices = LiveSettings(**live["settings"]), live["devices"]
    saved, present = state["config"], config.model_dump(mode="json")
    is_new_split = any(saved["parallel"].get(key) != present["parallel"][key] for key in SPLIT_NAMES)
    is_replanned = len(devices["names"]) != num and not is_new_split
    if is_replanned if split.shares is None else len(split.shares) != num:
        split = _replanned(settings, split, devices, locations, config.train.batch_size)
    configured = settings.with_split(split, is_auto=settings.is_auto if is_replanned else is_auto)
    # A config that was changed after commands and out-of-memory errors is the newer request.
    if saved["train"].get("recompute", "off") != present["train"]["recompute"]:
        settings, configured = (each.with_changes({"recompute": "config"}) for each in (settings, configured))
        replays = [each.without({"recompute", "is_recomputed"}) for each in replays]
    if is_replanned or is_new_split:
        settings = configured
        replays = [each.without(SPLIT_SETTINGS) for each in replays]
    trial = None if settings is configured or live["trial"] is None else Trial.from_state(live["trial"])
    record = ChangeRecord(settings, trial=trial, replays=tuple(each for each in replays if each.values))
    if trial is not None and trial.change is not None and (trial.epoch, trial.change.id) in reverted:
        record, _, _ = record.revert((), "") or (record, [], "")
    return Start(record, configured)


def _replanned(
    settings: LiveSettings,
    configured: SplitRequest,
    devices: Mapping[str, Any],
    locations: DeviceLocations,
    batch_size: int,
) -> SplitRequest:
    """Return a split that gives the devices of a checkpoint's last split their samples again."""
    is_planned = settings.is_auto and configured.shares is None and configured.first is not None
    if is_planned and len(locations.names) > 1:
        return configured
    if is_planned or settings.split == EVEN or len(locations.names) < 2:
        return EVEN
    # Without a split, the devices of the checkpoint count alike.
    last = devices["split"] or (1,) * len(devices["names"])
    planned = replan_shares(last, devices["names"], locations.names, batch_size)
    return SplitRequest(planned[0]) if settings.shares is None else SplitRequest(shares=planned)


def other_devices(
    saved: Mapping[str, Any], locations: DeviceLocations, split: Sequence[int] | None, step: int
) -> Settings | None:
    """Return the event of a resume on other devices than the checkpoint's; None for the same or one device."""
    if max(len(locations.names), len(saved["names"])) < 2:
        return None
    old, new = Counter(saved["names"]), Counter(locations.names)
    changes = [
        f"{word} {', '.join(each.elements())}" for word, each in (("without", old - new), ("with", new - old)) if each
    ]
    if not changes:
        return None
    change = Topology(
        ranks=len(locations.names),
        machines=locations.num_machines,
        old_ranks=len(saved["names"]),
        old_machines=saved["num_machines"],
        round=int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
    )
    divided = None if split is None else list(split)
    return Settings(step=step, reason="; ".join(changes), topology=change, split=divided)


def shares_note(config: RunConfig, locations: DeviceLocations, split: Sequence[int] | None) -> str | None:
    """Return a sentence if `parallel.shares` is a list for another number of devices; None if not."""
    shares, num = config.parallel.shares, len(locations.names)
    if shares is None or len(shares) == num:
        return None
    used = "nothing is divided" if split is None else f"split {list(split)} is planned from the last one"
    return f"parallel.shares = {shares} is for {len(shares)} devices, and this resume has {num}: {used}"
