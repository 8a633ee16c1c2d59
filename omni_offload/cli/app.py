"""The commands. What needs torch is imported by the command that needs it: help and the list of pipelines come at once."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import pipelines
from omni_offload.cli import BAD_INPUT, PROGRAM
from omni_offload.cli.problems import InputError, one_line
from omni_offload.errors import OffloadError

__all__ = ["app", "run_app"]

_INTERRUPTED = 130
_FAILED = 1
_WIDE = 200  # columns, where no terminal says how many there are

# ruff: noqa: PLC0415  (as the first line says)

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run diffusion pipelines on accelerators smaller than their weights.",
)

_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")  # typer may bring its own click


def run_app(arguments: Sequence[str]) -> int:
    """Run a command line; what a user can put right ends in one line on standard error and `BAD_INPUT`."""
    try:
        status = app(args=list(arguments), prog_name=PROGRAM, standalone_mode=False)
    except _USAGE_ERROR as error:
        return _refuse(error.format_message() or "no command was given; see --help")
    except (InputError, OffloadError, NotImplementedError) as error:
        return _refuse(error)
    except ModuleNotFoundError as error:
        return _refuse(f"{error.msg}: install the extra that brings it, `pip install 'omni-offload[pipelines]'`")
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    return status if isinstance(status, int) else 0


@app.command(name="pipelines")
def list_pipelines(
    *,
    covered: Annotated[
        bool, typer.Option("--coverage", help="Say which pipelines of the installed diffusers are left out, and why.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list; with --coverage, an object.")] = False,
) -> None:
    """List the registered pipelines."""
    if covered:
        from omni_offload.cli.coverage import coverage_lines

        for line in coverage_lines(as_json=as_json):
            _write(line)
        return
    entries = pipelines.registered().values()
    if as_json:
        rows = [{"name": e.name, "class": e.pipeline, "upstream": e.upstream_name, "cases": list(e.cases)} for e in entries]
        _write(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "stands for", "class"):
        table.add_column(column)
    for entry in entries:
        table.add_row(entry.name, entry.upstream_name, entry.pipeline)
    _console().print(table)


@app.command()
def run(  # noqa: PLR0913  (options of a command line)
    target: Annotated[str, typer.Argument(help="A registered pipeline, or a local folder with a saved one.")],
    *,
    prompt: Annotated[str | None, typer.Option(help="What the picture shows.")] = None,
    mode: Annotated[str, typer.Option(help="How weights are moved: module, or layer.")] = "module",
    device: Annotated[str | None, typer.Option(help="cpu, sim, or an accelerator such as cuda; left out: the best there is.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Upper bound on weights on the device, such as 12GiB.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Size of the simulated device, such as 2MiB.")] = None,
    output: Annotated[Path | None, typer.Option(help="The PNG; left out: in outputs/.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="A PNG of what was copied, computed and waited for when.")] = None,
    trace: Annotated[Path | None, typer.Option(help="The same as JSON, for ui.perfetto.dev or chrome://tracing.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the noise that the picture starts from.")] = 0,
    no_pin: Annotated[bool, typer.Option("--no-pin", help="Leave host memory pageable.")] = False,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="On a real accelerator: make no resident run to compare with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a picture with offloaded weights, and show what was moved."""
    from omni_offload.cli.recordings import RecordingFiles
    from omni_offload.cli.run import run_target
    from omni_offload.cli.show import show

    summary = run_target(
        target,
        prompt=prompt,
        mode=mode,
        device=device,
        device_memory=device_memory,
        capacity=capacity,
        output=output,
        files=RecordingFiles(timeline=timeline, trace=trace),
        steps=steps,
        seed=seed,
        pin_memory=not no_pin,
        compare=not no_compare,
    )
    if as_json:
        _write(summary.to_json())
    else:
        show(summary, _console())


@app.command()
def check(  # noqa: PLR0913  (options of a command line)
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET|MODULE:CASE]...",
            help="Registered pipelines (all their cases), local folders with saved ones, or PipelineCases of importable modules. A "
            "folder is called as a registered case of its class is: its prompt, its small size, its few steps.",
        ),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every registered pipeline.")] = False,
    checks: Annotated[list[str] | None, typer.Option(metavar="NAME,...", help="Only these checks; may be repeated.")] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Try everything where a seeded sample is the default.")] = False,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    mode: Annotated[str, typer.Option(help="How weights are moved: module, or layer.")] = "module",
    device: Annotated[str | None, typer.Option(help="An accelerator; left out: the simulated one.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16 or fp16; may be repeated. Left out: as each case makes it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for all cases.")] = False,
) -> None:
    """Run the contract: does offload change a bit, leave something behind, or hide a failure?

    The exit status is 1 where a check failed, or passed that a case expects to fail.
    """
    from omni_offload.cli.check import run_checks
    from omni_offload.cli.verdict import show_case, show_total

    console = _console()
    verdict = run_checks(
        targets or [],
        every=every,
        checks=checks,
        exhaustive=exhaustive,
        seed=seed,
        device=device,
        mode=mode,
        dtypes=dtype or [],
        each=(lambda _: None) if as_json else (lambda checked: show_case(checked, console)),
    )
    if as_json:
        _write(verdict.to_json())
    else:
        show_total(verdict, console)
    if verdict.interrupted:
        raise typer.Exit(_INTERRUPTED)
    if not verdict.good:
        raise typer.Exit(_FAILED)


@app.command()
def audit(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET|MODULE:CASE...",
            help="Registered pipelines (all their cases), local folders with saved ones, or PipelineCases of importable modules; a case "
            "may make a plain upstream pipeline.",
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for all cases.")] = False,
) -> None:
    """Run a call and list what no declaration covers: reads of weights, components and stacks of blocks.

    It needs no accelerator. The exit status is 1 where something is to be declared.
    """
    from omni_offload.cli.audit import audits_json, run_audits, show_audit

    console = _console()
    reports = run_audits(targets, each=(lambda _: None) if as_json else (lambda report: show_audit(report, console)))
    if as_json:
        _write(audits_json(reports))
    if not all(report.clean for report in reports):
        raise typer.Exit(_FAILED)


@app.command()
def scaffold(
    pipeline_class: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="A diffusers pipeline class, such as diffusers:BriaPipeline.")
    ],
    *,
    case: Annotated[
        str, typer.Option(metavar="MODULE:CASE", help="A PipelineCase that makes a plain pipeline of it, or a function that returns one.")
    ],
    folder: Annotated[Path | None, typer.Option(help="Where the family's folder goes; left out: the working folder.")] = None,
    name: Annotated[str | None, typer.Option(help="The family's name; left out: made of the class's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the folder of a family: the class with its declarations, found by audits of the case, and a case for the contract.

    No file is replaced.
    """
    from omni_offload.cli.scaffold import run_scaffold, show_scaffold

    made = run_scaffold(pipeline_class, case=case, folder=folder, name=name)
    if as_json:
        _write(made.to_json())
    else:
        show_scaffold(made, _console())


def _refuse(error: BaseException | str) -> int:
    sys.stderr.write(f"{PROGRAM}: {one_line(error)}\n")
    return BAD_INPUT


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)
