# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker doctor`: whether this machine can run a broker, and what to do where it cannot."""

import os

import click

from .invocation import Command, invocation


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker doctor", "examine libraries, device, memory, permissions and limits"),
        ("qnnbroker doctor --qnn-lib-dir /opt/qnn/lib", "with another set of QNN libraries"),
        ("qnnbroker doctor --json | jq '.findings[] | select(.status != \"ok\")'", "the rest"),
    ],
)
@click.option("--qnn-lib-dir", metavar="DIR", default=None, help="Directory of libQnnHtp.so.")
@click.option("--rpcmem-library", metavar="FILE", default=None, help="Path of libcdsprpc.so.")
@click.option("--backend", type=click.Choice(["qnn", "fake"]), default=None, help="As for serve.")
def doctor(qnn_lib_dir: str | None, rpcmem_library: str | None, backend: str | None) -> None:
    """Examine this machine: libraries, device, memory, limits.

    Options that are not given are those that serve would use. Libraries are loaded, and a tiny
    graph is compiled and executed, in processes of their own: a crash there is a finding. Exits
    with 1 when a finding is an error; warnings leave it at 0.
    """
    from .doctoring import ERROR, Options, examine
    from .options import effective
    from .output import print_json

    call = invocation()
    given = {
        "qnn_lib_dir": qnn_lib_dir,
        "rpcmem_library": rpcmem_library,
        "backend": backend,
    }
    _, settings = effective(call.config_file, given)
    directory = settings["qnn_lib_dir"].value
    options = Options(
        directory=call.directory(),
        fake=settings["backend"].value == "fake",
        qnn_lib_dir=os.path.abspath(directory) if directory else "",
        rpcmem_library=settings["rpcmem_library"].value,
    )
    findings = []
    for finding in examine(options):
        findings.append(finding)
        if not call.json:
            show(finding.name, finding.status, finding.found, finding.advice)
    failed = any(f.status == ERROR for f in findings)
    if call.json:
        print_json({"ok": not failed, "findings": [f.as_json() for f in findings]})
    else:
        show_summary([f.status for f in findings])
    if failed:
        raise click.exceptions.Exit(1)


def show_summary(statuses: list[str]) -> None:
    """The last line."""
    from .doctoring import ERROR, WARNING
    from .output import print_line

    errors, warnings = statuses.count(ERROR), statuses.count(WARNING)
    verdict = "serve cannot run here" if errors else "serve can run here"
    counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    print_line(f"{verdict}: {counts}; docs/device.md is about devices")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def show(name: str, status: str, found: str, advice: str) -> None:
    """One finding for people, as soon as it is there."""
    from .output import print_line

    print_line(f"{status:<8} {name}: {' '.join(found.split())}")
    if advice:
        print_line(f"{'':<8} -> {advice}")
