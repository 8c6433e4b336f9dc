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

from medfed.federation.method import Method, MethodSettings
from medfed.methods.noise_aware import ramp_up
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


class Ramp(MethodSettings):
    """Rise of the teacher's weight, ``exp(-5 (1 - (clip(t, begin, end) - begin) / (end - begin))^2)``.

    Args:
        begin: round, counted from 0, up to which it stays at exp(-5).
        end: round from which it is 1.
    """

    begin: int = Field(2, ge=0)
    end: int = Field(49, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Ramp:
        if self.end <= self.begin:
            raise ValueError("end must be after begin")
        return self


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
        ramp: rise of the teacher's weight; None keeps it constant.
    """

    form: Literal["published", "as_released"] = "published"
    stage_one: PlainStageOne = PlainStageOne()
    balanced: bool = False
    maximum: bool = False
    absolute: bool = True
    min_samples: int = Field(20, ge=1)
    normalise: bool = True
    coefficient: float | None = Field(0.2, ge=0, le=1)
    temperature: float = Field(1.0, gt=0)
    soften_student: bool = False
    distil_on: Literal["all", "disagree"] = "disagree"
    ramp: Ramp | None = Ramp()

    @model_validator(mode="before")
    @classmethod
    def _form(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {**FORMS.get(str(given.get("form", "published")), {}), **given}

    def teacher_weight(self, clean: int, clients: int, round: int) -> float:
        """As of OCT-FedSIR, times the ramp."""
        rise = 1.0 if self.ramp is None else ramp_up(round, self.ramp.begin, self.ramp.end)
        return super().teacher_weight(clean, clients, round) * rise


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
