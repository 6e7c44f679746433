"""The names that users, dashboards and scripts use: labels, the readiness gate, condition types, Event reasons."""

from enum import StrEnum
from typing import Final

from dualmap.objects.pods import IN_RING_GATE as IN_RING_GATE
from dualmap.objects.pool_reader import API_VERSION, GROUP

KIND: Final = "InferencePool"
PLURAL: Final = "inferencepools"
VERSION: Final = API_VERSION.removeprefix(f"{GROUP}/")
FIELD_MANAGER: Final = "dualmap-operator"
FINALIZER: Final = f"{GROUP}/drain"
POOL_LABEL: Final = f"{GROUP}/pool"
ORDINAL_LABEL: Final = "apps.kubernetes.io/pod-index"
REVISION_LABEL: Final = "controller-revision-hash"


class ConditionType(StrEnum):
    """The condition types in an InferencePool's status."""

    ACCEPTED = "Accepted"
    AVAILABLE = "Available"
    RING_SYNCED = "RingSynced"
    PROGRESSING = "Progressing"
    DRAINING = "Draining"
    SCALING_LIMITED = "ScalingLimited"
    TOKENS_AGREE = "TokensAgree"
    KV_STORE_AVAILABLE = "KvStoreAvailable"
    DEGRADED = "Degraded"


class EventReason(StrEnum):
    """The reasons of the Events that the operator records on a pool."""

    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    TEMPLATE_WARNING = "TemplateWarning"
    MODEL_CONFLICT = "ModelConflict"
    PREFILL_POOL_UNUSABLE = "PrefillPoolUnusable"
    MEMBER_JOINING = "MemberJoining"
    MEMBER_ACTIVE = "MemberActive"
    MEMBER_DRAINING = "MemberDraining"
    MEMBER_LEFT = "MemberLeft"
    DRAIN_TIMED_OUT = "DrainTimedOut"
    DRAIN_CANCELLED = "DrainCancelled"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    ROLLING_POD = "RollingPod"
    POOL_DEGRADED = "PoolDegraded"
    POOL_RECOVERED = "PoolRecovered"
