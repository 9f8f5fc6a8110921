"""Facts on models from the literature: skew, slow-down by spreading, GPU use.

A model that was not measured has no facts.

skew_ratio: Tiresias, NSDI'19, table 6. gpu_busy_ratio: Gandiva, OSDI'18, section 4.2. The speeds
over machines and racks are those of the simulator of Themis' first author (NSDI'20): its "slot",
GPUs that are joined directly, is a node here; its "machine" several nodes of a rack; its "rack"
several racks. Models that it lacks take two servers' 0.85 of Philly's ResNet-50 (ATC'19, section
3.2.1), and over racks the same once more.
"""

from __future__ import annotations

from msgspec import Struct

PHILLY_SPREAD_RATIO = 0.85


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Measured facts of one model; None where there is no measurement."""

    skew_ratio: float | None = None
    gpu_busy_ratio: float | None = None
    rack_speed_ratio: float = PHILLY_SPREAD_RATIO
    far_speed_ratio: float = PHILLY_SPREAD_RATIO * PHILLY_SPREAD_RATIO


_SKEWED = {"rack_speed_ratio": 0.72, "far_speed_ratio": 0.52}
_EVEN = {"rack_speed_ratio": 0.98, "far_speed_ratio": 0.96}

MODEL_FACTS: dict[str, ModelFacts] = {
    "vgg19": ModelFacts(skew_ratio=0.715),
    "vgg16": ModelFacts(skew_ratio=0.743, **_SKEWED),
    "vgg11": ModelFacts(skew_ratio=0.773),
    "alexnet": ModelFacts(skew_ratio=0.610),
    "resnet152": ModelFacts(skew_ratio=0.039),
    "resnet101": ModelFacts(skew_ratio=0.053),
    "resnet50": ModelFacts(skew_ratio=0.092, gpu_busy_ratio=0.94, **_EVEN),
    "inception4": ModelFacts(skew_ratio=0.036),
    "inception3": ModelFacts(skew_ratio=0.086, **_EVEN),
    "googlenet": ModelFacts(skew_ratio=0.146),
    "vae": ModelFacts(gpu_busy_ratio=0.087),
    "superres": ModelFacts(gpu_busy_ratio=0.141),
    "rhn": ModelFacts(gpu_busy_ratio=0.616),
    "scrnn": ModelFacts(gpu_busy_ratio=0.668),
    "milstm": ModelFacts(gpu_busy_ratio=0.762),
    "lstm": ModelFacts(gpu_busy_ratio=0.872),
    "resnext50": ModelFacts(gpu_busy_ratio=0.989),
}


def facts_of(model: str) -> ModelFacts | None:
    """Facts of a model, however its name is written: `ResNet-50` is `resnet50`."""
    return MODEL_FACTS.get("".join(mark for mark in model.lower() if mark.isalnum()))
