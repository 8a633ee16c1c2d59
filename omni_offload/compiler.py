"""torch.compile beside code that must run as it is written.

The compiler looks at every Python frame that a thread enters while it is switched on there. What moves weights switches it off,
and on again around the method that it surrounds: a break in the graph around that method, which itself is compiled as ever.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

__all__ = ["Compiler", "call_compiled", "left_alone", "switch_off", "switch_on"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: What is switched on: torch's own, or nothing.
Compiler = Any


def left_alone(reason: str) -> Callable[[_F], _F]:
    """Have a function run as it is written, and be a break in any graph around it; what it calls may be compiled.

    The same as `torch.compiler.disable(recursive=False)`, which imports the whole compiler (seconds).

    Args:
        reason: What torch says where no break is allowed (`fullgraph=True`).
    """

    def mark(function: _F) -> _F:
        function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason, _torchdynamo_disable_recursive=False)
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
        return function

    return mark


def switch_off() -> Compiler:
    """Switch the compiler off in this thread; return what was on, None where nothing was (0.1 us)."""
    return set_eval_frame(None)


def switch_on(compiler: Compiler) -> None:
    """Switch on again what was on."""
    set_eval_frame(compiler)


def call_compiled(compiler: Compiler, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with the compiler on, and switch it off afterwards, whatever happens."""
    try:
        set_eval_frame(compiler)
        return function(*args, **kwargs)
    finally:
        set_eval_frame(None)
