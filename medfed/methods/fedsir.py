"""FedSIR: spectral identification and relabelling under label noise, of which OCT-FedSIR is the successor.

Gholami et al., arXiv 2604.20825, CVPR 2026. The same program as :mod:`~medfed.methods.oct_fedsir` with mathematics of
its own:

- Stage I with plain cross-entropy; classes unbalanced, of at least 20 samples (all where fewer than two have them);
  descriptors of absolute cosines: mean and energy, no maximum.
- Scores with features of length one, and absolute projections.
- The teacher's weight rises over the rounds; its own logits are softened, the student's are not; after the first
  checkpoint it teaches only samples whose two criteria disagree.

The paper and the released code differ; ``form`` chooses, and every difference is a setting of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from medfed.federation.method import Method
from medfed.methods.noise_aware import ramp_up, short_ramp
from medfed.methods.oct_fedsir import TASKS, OctFedSIRSettings, program
from medfed.methods.stage_one import StageOne

FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "as_released": {
        "augmented": True,
        "temperature": 0.8,
        "weighting": "spectral",
        "min_reference": 100,
        "min_gap": 0.03,
    },
}


class PlainStageOne(StageOne):
    """As :class:`StageOne`, with plain cross-entropy."""

    logit_adjustment: bool | None = False


class FedSIRSettings(OctFedSIRSettings):
    """Settings of FedSIR.

    Args:
        form: ``published``, or ``as_released``: the defaults of what the released code does otherwise (features of
            augmented images, temperature 0.8 instead of 1, projectors weighted by spectral dominance, blocks of fewer
            than 100 samples ignored, and the largest client's own reference where the clean clients disagree). A
            setting that is given holds in both.
        ramp_begin: round, counted from 0, up to which the teacher has exp(-5) of ``teacher_weight``.
        ramp_end: round, counted from 0, from which it has all of it; at or before the begin there is no ramp.
    """

    form: Literal["published", "as_released"] = "published"
    stage_one: PlainStageOne = PlainStageOne()
    balanced: bool = False
    maximum: bool = False
    absolute: bool = True
    min_samples: int = Field(20, ge=1)
    normalise: bool = True
    teacher_weight: float | None = Field(0.2, ge=0, le=1)
    temperature: float = Field(1.0, gt=0)
    soften_student: bool = False
    distil_on: Literal["all", "disagree"] = "disagree"
    ramp_begin: int = Field(2, ge=0)
    ramp_end: int = Field(49, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _form(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {**FORMS.get(str(given.get("form", "published")), {}), **given}

    def check(self, rounds: int) -> list[str]:
        """As of OCT-FedSIR; says where the ramp is longer than the run."""
        found = super().check(rounds)
        if not self.distillation:
            return found + self.idle(("ramp_begin", "ramp_end"), "distillation: false")
        return found + short_ramp(rounds, self.ramp_begin, self.ramp_end)

    def weight_of_teacher(self, clean: int, clients: int, round: int) -> float:
        """As of OCT-FedSIR, times the ramp."""
        return super().weight_of_teacher(clean, clients, round) * ramp_up(round, self.ramp_begin, self.ramp_end)


METHOD = Method(
    name="fedsir",
    title="Spectral identification and relabelling (label noise)",
    paper="Gholami et al., CVPR 2026",
    program=program,
    tasks=TASKS,
    settings=FedSIRSettings,
    sends="two descriptors (or evidence) once; class references at checkpoints from clean clients",
    keeps="training targets, class similarity, audit of its own labels",
    needs="a clean client",
    task_kinds=("multiclass",),
)
