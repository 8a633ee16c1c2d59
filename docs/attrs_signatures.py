"""Signatures of attrs classes for the API reference, whose tool reads the code without running it and knows dataclasses only."""  # noqa: INP001  (no package)

from typing import Any

import griffe

__all__ = ["AttrsSignatures"]

_DECORATORS = ("attrs.frozen", "attrs.define")


class AttrsSignatures(griffe.Extension):
    """Gives each class that attrs decorates the `__init__` that attrs makes."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add the method, once the class's fields are known."""
        decorator = next((one.value for one in cls.decorators if one.callable_path in _DECORATORS), None)
        if decorator is None or "__init__" in cls.members:
            return
        keyword_only = _arguments(decorator).get("kw_only") == "True"
        fields = [member for member in cls.members.values() if isinstance(member, griffe.Attribute) and _is_field(member)]
        own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        parameters = griffe.Parameters(own, *(_parameter(field, keyword_only=keyword_only) for field in fields))
        cls.set_member("__init__", griffe.Function("__init__", parent=cls, parameters=parameters, returns="None"))


def _is_field(member: griffe.Attribute) -> bool:
    on_class_only = "class-attribute" in member.labels and "instance-attribute" not in member.labels
    return (
        member.annotation is not None
        and "property" not in member.labels
        and not on_class_only
        and _arguments(member.value).get("init") != "False"
    )


def _parameter(field: griffe.Attribute, *, keyword_only: bool) -> griffe.Parameter:
    arguments = _arguments(field.value) if str(field.value).startswith("attrs.field(") else None
    default = (
        field.value if arguments is None else arguments.get("default", f"{arguments['factory']}()" if "factory" in arguments else None)
    )
    alone = keyword_only or (arguments or {}).get("kw_only") == "True"
    kind = griffe.ParameterKind.keyword_only if alone else griffe.ParameterKind.positional_or_keyword
    return griffe.Parameter(field.name.lstrip("_"), annotation=field.annotation, kind=kind, default=default)


def _arguments(call: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call, as expressions; none for anything else."""
    given = call.arguments if isinstance(call, griffe.ExprCall) else ()
    return {one.name: one.value for one in given if isinstance(one, griffe.ExprKeyword)} if given else {}
