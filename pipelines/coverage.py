"""Which pipeline classes of the installed diffusers are registered, and why the others are not."""

import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from types import MappingProxyType

import attrs

from pipelines.entry import PREFIX
from pipelines.registry import registered

__all__ = ["DEPRECATED", "LEFT_OUT", "NEVER_RUNS", "NOT_YET", "Coverage", "coverage"]

DEPRECATED = "deprecated upstream"
NEVER_RUNS = "each call of it is an error upstream"
NOT_YET = "not declared yet, but `omni-offload scaffold` writes the declarations"

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "diffusers.pipelines.diffusion_gemma": "makes text",
        "diffusers.pipelines.easyanimate.pipeline_easyanimate_control": NEVER_RUNS,
        "diffusers.pipelines.llada2": "makes text",
        "diffusers.pipelines.rfd4_proteina": "makes structures of proteins",
    }
)
"""Module of upstream classes that stay out, and the reason. Deprecated ones are found by themselves; all others are not declared yet."""


@attrs.frozen(kw_only=True)
class Coverage:
    """What of the installed diffusers is registered.

    Attributes:
        version: Of diffusers.
        registered: Names of the upstream classes that registered ones stand for.
        left_out: Reason -> names of the upstream classes that are left out for it.
    """

    version: str
    registered: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]

    @property
    def total(self) -> int:
        """How many pipeline classes diffusers has."""
        return len(self.registered) + sum(map(len, self.left_out.values()))

    def __str__(self) -> str:
        """Return the coverage line."""
        others = ", ".join(f"{len(names)} ({reason})" for reason, names in self.left_out.items())
        found = f"{len(self.registered)} of the {self.total} pipeline classes of diffusers {self.version} are registered"
        return f"{found}; left out are {others}" if others else found


def coverage() -> Coverage:
    """Count the pipeline classes of the installed diffusers; imports all of them, which takes seconds.

    Returns:
        Which are registered, by this package and by others, and the reason of each one that is not.
    """
    known = {entry.upstream_name for entry in registered().values() if entry.class_name.startswith(PREFIX)}
    found: list[str] = []
    left_out: dict[str, list[str]] = {DEPRECATED: [], **{reason: [] for reason in LEFT_OUT.values()}, NOT_YET: []}
    for name, cls in _upstream_classes():
        if name in known:
            found.append(name)
        else:
            left_out[_reason(cls)].append(name)
    reasons = {reason: tuple(names) for reason, names in left_out.items() if names}
    return Coverage(version=version("diffusers"), registered=tuple(found), left_out=MappingProxyType(reasons))


def _upstream_classes() -> Iterator[tuple[str, type]]:
    """Yield name and class of every pipeline of diffusers, without the base of all."""
    import diffusers  # noqa: PLC0415  (importing this package imports no diffusers)

    for name in sorted(dir(diffusers)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class is imported here, and its module warns of what it uses itself
            cls = getattr(diffusers, name, None)
        if isinstance(cls, type) and cls is not diffusers.DiffusionPipeline and issubclass(cls, diffusers.DiffusionPipeline):
            yield name, cls


def _reason(cls: type) -> str:
    if ".deprecated." in cls.__module__ or any(base.__name__ == "DeprecatedPipelineMixin" for base in cls.__mro__):
        return DEPRECATED
    return next((reason for module, reason in LEFT_OUT.items() if f"{cls.__module__}.".startswith(f"{module}.")), NOT_YET)
