"""Places in an engine that a plug-in needs, compared by name and parameters before anything is replaced."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger("specdec_kernels")


class Hook(NamedTuple):
    """module, dotted name in it, the parameters it must have, first to last (more may follow). may_be_none: the engine
    has the name, but no function under it, on some devices."""

    module: str
    name: str
    parameters: tuple[str, ...]
    may_be_none: bool = False

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def missing_hooks(hooks: Sequence[Hook]) -> list[str]:
    """A line for every hook that is not where it was, or has other parameters; empty: all is well."""
    found = []
    for hook in hooks:
        try:
            target: Any = importlib.import_module(hook.module)
            for part in hook.name.split("."):
                target = getattr(target, part)
            if target is None and hook.may_be_none:
                continue
            own = tuple(inspect.signature(target).parameters)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            found.append(f"{hook.path}: {type(error).__name__}: {error}")
            continue
        if own[: len(hook.parameters)] != hook.parameters:
            found.append(f"{hook.path}: expected parameters {', '.join(hook.parameters)}, got {', '.join(own)}")
    return found


def usable(engine: str, module: str, tested: Sequence[str], missing: Callable[[], list[str]]) -> bool:
    """Whether an engine has all that is needed; if not, one line in the log says what moved. Never raises: the engine
    goes on without us, whatever is wrong here."""
    try:
        version = str(importlib.import_module(module).__version__)
        moved = missing()
    except Exception as error:
        logger.warning("specdec_kernels: %s unchanged: %r", engine, error)
        return False
    if moved:
        logger.warning("specdec_kernels: %s %s unchanged, tested with %s: %s", engine, version, ", ".join(tested), moved[0])  # fmt: skip  # noqa: E501
    return not moved
