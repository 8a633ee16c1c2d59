"""What a mutant is."""

import attrs


@attrs.frozen
class Mutant:
    """One deliberate fault.

    Args:
        name: What it is called on the command line.
        file: The file in the package.
        fragment: Text that stands in it exactly once.
        replacement: What it is replaced by.
        fault: What a user would see.
        killers: The tests that must notice, parameters left out: fast ones that do the same in every run.
    """

    name: str
    file: str
    fragment: str
    replacement: str
    fault: str
    killers: tuple[str, ...]
