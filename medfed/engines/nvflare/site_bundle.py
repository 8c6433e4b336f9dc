"""The bundle at a site: the agreed one, checked before anything of it is evaluated, and what the site changes in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.bundle_check import BundleRefused, check_bundle
from medfed.engines.nvflare.plan import SitePlan
from medfed.errors import ConfigError
from medfed.training.bundle import LOCAL_KEYS, SEPARATOR, TrainingBundle

if TYPE_CHECKING:
    from medfed.engines.nvflare.site_settings import SiteSettings

# What a site may change beside how it prepares its images, and what it may not although preparation refers to it.
OWN = ("augment", "batch_size", "num_workers", "weights", *LOCAL_KEYS)
AGREED = ("classes", "task", "in_channels", "image_size")


def site_bundle(plan: SitePlan, settings: SiteSettings) -> TrainingBundle:
    """The bundle that a site trains: the agreed one with the site's own overrides.

    Args:
        plan: what all agreed on.
        settings: the site's own.

    Raises:
        ConfigError: there is none, it is another one, it holds what it may not hold, or the site changes what is
            agreed.
    """
    agreed = agreed_bundle(plan, settings.bundle, settings.allow, settings.overrides)
    if not settings.overrides:
        return agreed
    allowed = own_keys(agreed)
    bad = sorted(key for key in settings.overrides if top(key) not in allowed)
    if bad:
        raise ConfigError(
            "its site.yaml overrides what all sites have agreed on",
            where=f"overrides: {', '.join(bad)}",
            fix=f"Take that out. A site may override {', '.join(allowed)}.",
        )
    try:
        return TrainingBundle.load(agreed.root, {**agreed_overrides(plan), **settings.overrides})
    except ConfigError as error:
        raise ConfigError("its overrides do not fit the bundle", where="site.yaml, overrides", fix=str(error)) from None


def own_keys(bundle: TrainingBundle) -> list[str]:
    """The top-level keys of a bundle that a site may override: preparation, augmentation, paths, batches."""
    return sorted({*bundle.preparation(), *(key for key in OWN if key in bundle.config)} - set(AGREED))


def top(key: str) -> str:
    """The first level of a key."""
    return key.replace("#", SEPARATOR).split(SEPARATOR)[0]


def agreed_overrides(plan: SitePlan) -> dict[str, Any]:
    """The overrides of the job, with its classes."""
    return {**plan.overrides, "classes": list(plan.classes), "task": plan.task}


def agreed_bundle(
    plan: SitePlan, root: str | None = None, allow: Sequence[str] = (), own: Mapping[str, Any] | None = None
) -> TrainingBundle:
    """The bundle that all agreed on, with the job's classes.

    At a real site its files are read as text first, and nothing of them is evaluated unless they hold nothing that they
    may not hold and are those agreed on (:func:`~medfed.bundle_check.check_bundle`).

    Args:
        plan: what all agreed on.
        root: where the site keeps the bundle; by default where the plan says.
        allow: further names that the site lets a bundle use.
        own: the site's own overrides: held to the same rules, not applied.

    Raises:
        ConfigError: there is none, it is another one, or it holds what it may not hold.
    """
    if plan.simulation is None:
        try:
            check_bundle(root or plan.bundle, plan.files_hash, {**plan.overrides, **(own or {})}, allow)
        except BundleRefused as refused:
            agreed = plan.files_hash[:12]
            what = f"its bundle '{plan.bundle}' is not the agreed one ({agreed}), or holds what it may not hold"
            raise ConfigError(what, fix=str(refused)) from None
    bundle = TrainingBundle.load(root or plan.bundle, agreed_overrides(plan))
    if bundle.content_hash() != plan.bundle_hash:
        raise ConfigError(
            f"the bundle '{Path(plan.bundle).name}' is not the agreed one "
            f"(hash {bundle.content_hash()[:12]}, agreed {plan.bundle_hash[:12]})",
            where=str(bundle.root),
            fix="Install the agreed version of medfed and of the bundle.",
        )
    return bundle
