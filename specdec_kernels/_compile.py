"""What torch.compile needs to know of this package, said without importing Dynamo, which doubles the import."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_result(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`: compiled code calls `function` once, when it is traced."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
