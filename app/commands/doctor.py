"""`moonvit-serve doctor`: looks at everything `serve` would need, and says what to do about what is missing."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from app.commands import check_access, check_device, check_host
from app.commands.findings import Finding
from app.settings import Settings

Check = Callable[[Settings], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    check_host.check_platform,
    check_device.check_model,
    check_device.check_gpu,
    check_device.check_compiler,
    check_device.check_libraries,
    check_device.check_attention,
    check_host.check_decoders,
    check_host.check_sandbox,
    check_host.check_files,
    check_host.check_memory_files,
    check_host.check_memory,
    check_host.check_store,
    check_host.check_port,
    check_access.check_keys,
    check_access.check_certificate,
    check_host.check_tracing,
    check_host.check_clock,
)
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def diagnose(settings: Settings, *, as_json: bool = False, checks: Sequence[Check] = CHECKS) -> int:
    """Print what was found, a line each, or as JSON; 1 if there is a problem, else 0."""
    findings = []
    console = Console(soft_wrap=True, highlight=False)
    for finding in look(settings, checks):
        findings.append(finding)
        if not as_json:  # each as soon as it is known: some take seconds
            console.print(_line(finding))
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        document = {"ok": not problems, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(document, indent=2))  # noqa: T201
    else:
        verdict = f"{problems} problems, {warnings} warnings" if problems else f"it would serve; {warnings} warnings"
        console.print(f"[bold]{verdict}[/]")
    return 1 if problems else 0


def look(settings: Settings, checks: Iterable[Check]) -> Iterator[Finding]:
    """What every check finds. One that fails itself is a problem, and the others go on."""
    for check in checks:
        try:
            yield from check(settings)
        except Exception as error:
            area = check.__name__.removeprefix("check_").replace("_", " ")
            text = f"could not be looked at: {type(error).__name__}: {str(error)[:200]}"
            yield Finding(area, "problem", text, "what fails here will fail in the service too")


def _line(finding: Finding) -> str:
    style = STYLES[finding.level]
    found = " ".join(finding.found.split())  # one line each, also of what has several
    advice = f" [dim]-> {escape(finding.advice)}[/]" if finding.advice else ""
    return f"[{style}]{finding.level:<8}[/] {finding.area:<13} {escape(found)}{advice}"
