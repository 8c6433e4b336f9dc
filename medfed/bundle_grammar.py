"""What a bundle's configuration may say, read off its text: nothing is imported, instantiated or evaluated here.

MONAI resolves any ``_target_`` to whatever can be imported, and hands any ``$`` text to Python's ``eval``.  Here both
are compared with short lists.  The references ``@id`` of an expression are replaced as MONAI replaces them, so that
what is parsed is what would be evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Full names, and never prefixes: a dotted name also reaches what a module has imported itself (``...transforms.os``).
# Left out on purpose: LoadImaged (imports the reader that it is told), Lambda, PersistentDataset (pickles),
# MLFlowHandler and download functions (send or fetch).
_TARGETS: dict[str, str] = {
    "medfed.data.transforms": "DecodeImaged CTWindowd ToUnitRanged ToChannelsd ResizeImaged WhiteBorderd Corruptd "
    "NormalizeBatch NormalizeUnitd",
    "medfed.inference": "InferenceDataset PredictionWriter",
    "medfed.training.augment": "BatchAugment PrepareBatch",
    "medfed.training.networks": "build_network",
    "medfed.training.standalone": "PooledMetric MetricsWriter NoiseRobustLoss FreshOptimizer",
    "medfed.training.steps": "PlainStep SharpnessAwareStep",
    "monai.data": "Dataset CacheDataset DataLoader",
    "monai.engines": "SupervisedTrainer SupervisedEvaluator",
    "monai.handlers": "CheckpointLoader CheckpointSaver EarlyStopHandler LrScheduleHandler StatsHandler "
    "ValidationHandler",
    "monai.inferers": "SimpleInferer",
    "monai.losses": "FocalLoss",
    "monai.networks.nets": "DenseNet121 EfficientNetBN",
    "monai.transforms": "Activationsd AsDiscreted CenterSpatialCropd Compose CropForegroundd EnsureChannelFirstd "
    "EnsureTyped NormalizeIntensityd RandAdjustContrastd RandAffined RandFlipd RandGaussianNoised RandGaussianSmoothd "
    "RandRotated RandScaleIntensityd RandShiftIntensityd RandZoomd Resized ScaleIntensityd ScaleIntensityRanged "
    "SelectItemsd SpatialPadd",
    "torch.nn": "BCEWithLogitsLoss CrossEntropyLoss",
    "torch.optim": "Adam AdamW NAdam RAdam RMSprop SGD",
    "torch.optim.lr_scheduler": "CosineAnnealingLR ExponentialLR MultiStepLR StepLR",
}
TARGETS = frozenset(f"{module}.{name}" for module, names in _TARGETS.items() for name in names.split())
MODES = ("default", "callable")
_FUNCTIONS = {
    "medfed.training.standalone": ("training_items", "evaluation_items", "class_counts"),
    "monai.handlers": ("from_engine",),
}
IMPORTS = frozenset(
    {"import torch", "import monai", *(f"from {m} import {n}" for m, names in _FUNCTIONS.items() for n in names)}
)
_BUILTINS: tuple[type | Callable[..., Any], ...] = (
    *(bool, dict, float, int, list, range, str, tuple),
    *(abs, len, max, min, round, sorted, sum),
)
CALLABLE = frozenset(b.__name__ for b in _BUILTINS) | {name for names in _FUNCTIONS.values() for name in names}
DOTTED = frozenset(
    {
        *("torch.device", "torch.cuda.is_available", "torch.float16", "torch.float32", "torch.bfloat16", "torch.int64"),
        *("monai.handlers.from_engine", "monai.utils.set_determinism"),
    }
)
METHODS = frozenset({"to", "parameters", "run", "eval", "train"})

# A generous bound for a hand-written file; YAML's anchors can make a short text into billions of values.
MOST_VALUES, DEEPEST, LONGEST_EXPRESSION = 20_000, 40, 300
_REFERENCES = "__local_refs"  # the name MONAI's resolver gives them
_REFERENCE = re.compile(r"@(?:\w*)(?:::\w*)*")
_WHOLE_REFERENCE = re.compile(r"@\w+(?:::\w+)*")
_MACRO = re.compile(r"%\w+(?:::\w+)*")
_KEY = re.compile(r"\+?[\w.\- ]+(?:(?:::|#)[\w.\- ]+)*")
_OUTSIDE = re.compile(r"(?:[/\\~]|[A-Za-z]:[/\\]|[A-Za-z][\w+.-]*://|(?:.*[/\\])?\.\.(?:[/\\]|$))")
_UPWARDS = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)")
_SPECIAL = ("_target_", "_mode_", "_disabled_", "_requires_", "_desc_")

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_PLAIN = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.List, ast.Tuple, ast.Dict),
    *(ast.Constant, ast.Load, ast.And, ast.Or, ast.Not, ast.USub, ast.UAdd, *_ARITHMETIC),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot),
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that a bundle may not hold.

    Args:
        where: file and key.
        what: what is wrong, in one sentence.
        fix: what to do about it.
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what} {self.fix}".rstrip()
        # Names and keys are the bundle's: control characters would reach the terminal, half a surrogate no file.
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def walk(config: Any, where: str, allow: Collection[str] = (), paths: Collection[str] | None = ()) -> Iterator[Fault]:
    """What must not stand in a configuration.

    Args:
        config: content of a file or of an override, as YAML or JSON gives it.
        where: its name, for messages.
        allow: further full names that ``_target_`` may have.
        paths: top-level keys that may name a place outside the bundle; None for all.

    Yields:
        Every fault; one fault and no more where the content is too large to be looked through.
    """
    values = 0
    waiting: list[tuple[str, Any, int]] = [("", config, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        values += 1
        place = f"{where}: {path}" if path else where
        if values > MOST_VALUES or depth > DEEPEST:
            yield Fault(where, "it is too large or nested too deeply.", "Write it out without YAML anchors.")
            return
        if isinstance(value, Mapping):
            for key, inner in reversed(list(value.items())):
                at = f"{path}::{key}" if path else str(key)
                yield from _key(key, inner, f"{where}: {at}", allow)
                waiting.append((at, inner, depth + 1))
        elif isinstance(value, (list, tuple)):
            waiting += [(f"{path}::{k}" if path else str(k), v, depth + 1) for k, v in reversed(list(enumerate(value)))]
        elif isinstance(value, str):
            reason = text_fault(value, paths is None or re.split("::|#", path)[0] in paths)
            if reason:
                yield Fault(place, *reason)
        elif not (value is None or isinstance(value, (bool, int, float))):
            yield Fault(place, f"a value of the kind {type(value).__name__}.", "Write it as text in quotes.")


def _key(key: Any, value: Any, place: str, allow: Collection[str]) -> Iterator[Fault]:
    """Faults of one key, which in an overlay may name something deep inside (``train::trainer::_target_``)."""
    if not isinstance(key, (str, int)) or isinstance(key, bool) or not _KEY.fullmatch(str(key)):
        yield Fault(place, "a key of other characters than letters, digits, '_', '-', '.' and blanks.", "Rename it.")
        return
    last = re.split(r"::|#", str(key))[-1].lstrip("+")
    if last == "_target_" and not (isinstance(value, str) and (value in TARGETS or value in allow)):
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        yield Fault(place, f"{shown} is not on the list of components that a bundle may use.", _target_fix(value))
    elif last == "_mode_" and value not in MODES:
        yield Fault(place, f"the mode {value!r} is not allowed.", f"Known: {', '.join(MODES)}.")
    elif last not in _SPECIAL and last != "_meta_" and last.startswith("_") and last.endswith("_"):
        yield Fault(place, f"'{last}' has a special meaning that a bundle does not need.", "Leave it out.")


def _target_fix(value: Any) -> str:
    if isinstance(value, str):
        full = sorted(name for name in TARGETS if name.rpartition(".")[2] == value.rpartition(".")[2])
        if full:
            return f"Write its full name, {full[0]}."
    return "Take one of medfed or MONAI that is on it, or let the site allow this one by name."


def text_fault(text: str, outside: bool = False) -> tuple[str, str] | None:
    """What is wrong with a text value, and what to do; None where nothing is.

    Args:
        text: the value.
        outside: whether it may be a path outside the bundle.
    """
    if text.startswith("$"):
        reason = expression_fault(text[1:])
        if reason is None:
            return None
        return f"the expression {_short(text)} is refused: {reason}.", "Use a plain value or a component."
    if text.startswith("%"):
        if _MACRO.fullmatch(text.replace("#", "::")):
            return None
        return f"the macro {_short(text)} reaches another file.", "Copy what it stands for into this file."
    if re.match(r"@(?:::|#)", text):
        return f"the reference {_short(text)} is relative.", "Write the whole id."
    if not outside and _OUTSIDE.match(text):
        return f"{_short(text)} is a place outside the bundle.", "Give it where the bundle is run."
    return None


def expression_fault(text: str) -> str | None:
    """Why an expression is refused; None where it keeps to the grammar.

    The grammar: constants, lists, tuples, dictionaries, comparison, arithmetic without powers, ``and``/``or``/``not``,
    ``a if b else c``, references, an item of a reference by constant; calls of :data:`CALLABLE` and :data:`DOTTED` and
    of the :data:`METHODS` of a reference; or one of the :data:`IMPORTS`.

    Args:
        text: the expression without its ``$``.
    """
    if len(text) > LONGEST_EXPRESSION:
        return f"it is longer than {LONGEST_EXPRESSION} characters"
    if imported := _import_of(text):
        return None if imported in IMPORTS else f"'{imported}' is not on the list of imports"
    text = text.replace("#", "::")
    ids = set(_REFERENCE.findall(text))
    if any(not _WHOLE_REFERENCE.fullmatch(i) for i in ids):
        return "a reference without a whole id"
    for reference in sorted(ids, key=len, reverse=True):
        text = text.replace(reference, f"{_REFERENCES}['{reference[1:]}']")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "it is no single Python expression"
    return _node_fault(tree)


def _import_of(text: str) -> str | None:
    """The import statement that a text begins with, as Python would write it; MONAI ignores what follows."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    if not body or not isinstance(body[0], (ast.Import, ast.ImportFrom)):
        return None
    return "; ".join(map(ast.unparse, body))


def _node_fault(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return None if _dotted(node) in DOTTED else f"'{ast.unparse(node)}' is not on the list"
    if isinstance(node, ast.Name):
        return None if node.id in CALLABLE else f"the name '{node.id}' is not on the list"
    if isinstance(node, ast.Subscript):
        return _reference_fault(node)
    if isinstance(node, ast.Call):
        return _call_fault(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "it leads out of the bundle" if _OUTSIDE.match(node.value) or _UPWARDS.search(node.value) else None
    if continued := _continued_path(node):
        return _node_fault(continued[0]) or ("it leads out of the bundle" if _UPWARDS.search(continued[1]) else None)
    if not isinstance(node, _PLAIN):
        return f"{type(node).__name__} is not part of the grammar"
    return next(filter(None, map(_node_fault, ast.iter_child_nodes(node))), None)


def _continued_path(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The two sides of text after a reference (``@bundle_root + '/models'``): the text does not begin a path."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Constant)):
        return None
    first = node.left
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
        first = first.left
    return (node.left, node.right.value) if isinstance(node.right.value, str) and _is_reference(first) else None


def _call_fault(node: ast.Call) -> str | None:
    function = node.func
    if isinstance(function, ast.Attribute) and _is_reference(function.value):
        reason = None if function.attr in METHODS else f"the method '{function.attr}' is not on the list"
    elif isinstance(function, (ast.Name, ast.Attribute)):
        reason = _node_fault(function)
    else:
        reason = f"a call of {type(function).__name__}"
    named = [k for k in node.keywords if k.arg is None or k.arg.startswith("_")]
    if reason or named:
        return reason or "keywords in a dictionary"
    return next(filter(None, map(_node_fault, [*node.args, *(k.value for k in node.keywords)])), None)


def _is_reference(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and _reference_fault(node) is None


def _reference_fault(node: ast.Subscript) -> str | None:
    """``__local_refs['id']``, and an item of it by a constant."""
    if not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, (str, int)):
        return "an index that is no constant"
    if isinstance(node.value, ast.Name) and node.value.id == _REFERENCES:
        return None
    return None if _is_reference(node.value) else "an item of something else than a reference"


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
