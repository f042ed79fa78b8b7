"""Mirrors: tables kept equal to the source, transaction by transaction."""

from consumer_sdk.mirror.notices import MirrorStatus, Notice
from consumer_sdk.mirror.runner import Mirror, mirror
from consumer_sdk.targets.memory import MemoryTarget
from consumer_sdk.targets.target import (
    CannotAlter,
    CopyState,
    Lane,
    MirrorCopy,
    MirrorPosition,
    SnapshotRow,
    Target,
    TargetState,
)
from consumer_sdk.targets.target_url import open_target

__all__ = [
    "CannotAlter",
    "CopyState",
    "Lane",
    "MemoryTarget",
    "Mirror",
    "MirrorCopy",
    "MirrorPosition",
    "MirrorStatus",
    "Notice",
    "SnapshotRow",
    "Target",
    "TargetState",
    "mirror",
    "open_target",
]
