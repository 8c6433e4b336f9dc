"""One self-contained HTML page: of a run, or of a comparison of runs.

Nothing on a page is loaded from elsewhere: style and figures are inline, there is no script.  Everything that comes
from a run directory is untrusted text and is escaped by the template engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medfed.errors import FederationError
from medfed.report.against import against
from medfed.report.compare import compare
from medfed.report.page import against_view, comparison_view, run_view
from medfed.report.runs import LAST, Run, load_run


def write_report(run_dir: str | Path, out: str | Path | None = None, *, last: int = LAST) -> Path:
    """Writes the page of one run.

    Args:
        run_dir: the run directory; it may be incomplete or still being written.
        out: the file; ``report.html`` in the run directory by default.
        last: rounds that a final number is the mean of.

    Returns:
        The file written.

    Raises:
        MedfedError: if ``run_dir`` is not a run directory.
        FederationError: if the file cannot be written.
    """
    run = load_run(run_dir)
    page = environment().get_template("run.html").render(run_view(run, last))
    return write_page(page, Path(out) if out is not None else run.path / "report.html")


def experiment_page(
    runs: Sequence[Run | str | Path],
    out: str | Path,
    *,
    title: str = "Comparison",
    metrics: Sequence[str] | None = None,
    baseline: str | None = None,
    last: int = LAST,
    allow_unpaired: bool = False,
    number: str | None = None,
) -> Path:
    """Writes the page that compares several runs.

    Args:
        runs: runs or run directories.
        out: the file.
        title: heading of the page.
        metrics: see :func:`medfed.report.compare.compare`.
        baseline: see there.
        last: see there.
        allow_unpaired: see there.
        number: number of the experiment that methods are drawn against; see :func:`medfed.report.against.against`.

    Returns:
        The file written.

    Raises:
        MedfedError: as :func:`medfed.report.compare.compare`; if the file cannot be written.
    """
    loaded = [r if isinstance(r, Run) else load_run(r) for r in runs]
    if number is not None:
        found = against(loaded, number, metrics=metrics, baseline=baseline, last=last, allow_unpaired=allow_unpaired)
        page = environment().get_template("against.html").render(against_view(found, title))
        return write_page(page, Path(out))
    result = compare(loaded, metrics=metrics, baseline=baseline, last=last, allow_unpaired=allow_unpaired)
    page = environment().get_template("experiment.html").render(comparison_view(result, title))
    return write_page(page, Path(out))


def environment() -> Any:
    """The template engine of all pages; it escapes everything."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def write_page(page: str, out: Path) -> Path:
    """Writes a page at once or not at all."""
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise FederationError(f"the page cannot be written: {error.strerror}.", where=str(out)) from None
    return out
