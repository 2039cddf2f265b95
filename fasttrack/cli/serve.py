"""``fasttrack serve``: one arm of a target's embedded engine behind an OpenAI-compatible API."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from fasttrack.cli.output import plain
from fasttrack.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from fasttrack.target import EngineSpec, Target


def serve(
    subject: Annotated[str, typer.Argument(metavar="MANIFEST|TARGET", help="A manifest, or a registered target.")],
    arm: Annotated[str, typer.Option(help="stock, optimized or sabotaged:FAULT.")] = "optimized",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 8,
    dcp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    draft_length: Annotated[int, typer.Option(min=0, help="Speculative drafts per step; 0: none.")] = 0,
    acceptance: Annotated[str, typer.Option(help="measured, or synthetic(AL).")] = "measured",
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 8,
    option: Annotated[list[str] | None, typer.Option(help="An engine option, NAME=VALUE; repeatable.")] = None,
    name: Annotated[str | None, typer.Option(help="Served model name; default: the target's name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
) -> int:
    """Serve completions, chat, models, tokenize, metrics. Prefix reuse is on unless an option says otherwise."""
    target, spec = spec_of(
        subject, arm, option or [], tp=tp, dcp=dcp, draft_length=draft_length, acceptance=acceptance,
        max_requests=max_requests,
    )  # fmt: skip
    try:
        import uvicorn

        from fasttrack.serve.app import create_app
    except ImportError as error:
        raise EvidenceError(f"serving needs the `run` extra: {error}") from None
    from fasttrack.engines.build import build_engine
    from fasttrack.target import DeploymentRefused, ServingEngine

    try:
        engine = build_engine(target, spec)
    except DeploymentRefused as refusal:
        raise UsageError(f"refused by the target: {refusal}", where=f"arm {arm}") from None
    if not isinstance(engine, ServingEngine):
        raise UsageError(f"the engine of {subject} cannot be served", expected="a target with a serving engine")
    served = name or target.describe().name
    config = uvicorn.Config(create_app(engine, served), host=host, port=port, log_level="warning")
    listener = _listen(host, port)
    if not _is_loopback(host):
        plain(f"Warning: {host} is not a loopback address; anyone who reaches it can use this server.")
    shape = (
        f"{arm}, tp {tp}" + (f", dcp {dcp}" if dcp > 1 else "") + (f", {draft_length} drafts" if draft_length else "")
    )
    plain(f"Serving {served} ({shape}) at http://{host}:{listener.getsockname()[1]}/v1")
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def spec_of(subject: str, arm: str, options: list[str], **deployment: Any) -> tuple[Target, EngineSpec]:
    """The target and the engine to build. A manifest brings its engine's options; ``options`` add to them."""
    from fasttrack.target import EngineSpec, find_target

    path, given, kind = Path(subject), dict[str, Any](), "embedded"
    if path.suffix in (".yaml", ".yml") or path.is_file():  # a folder may well have the name of a target
        from fasttrack.manifest import load_manifest, place

        manifest, _ = load_manifest(path)
        target = find_target(manifest.target, where=place(path, "target"))
        given, kind = dict(manifest.engine.options), manifest.engine.kind
    else:
        target = find_target(subject)
    if kind != "embedded":
        raise UsageError(f"engine {kind!r} is served by itself", where=subject, expected="an embedded engine")
    description = target.describe()
    if arm not in ("stock", "optimized") and not arm.startswith("sabotaged:"):
        raise UsageError(f"unknown arm {arm!r}", where="--arm", expected="stock, optimized or sabotaged:FAULT")
    given.setdefault("prefix_caching", True)
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{text!r}", where="--option", expected="NAME=VALUE")
        try:
            given[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"{text!r}", where="--option", expected="NAME=VALUE with a YAML value") from None
    switch = description.off if arm == "stock" else description.on
    return target, EngineSpec(kind, arm, switch, options=given, **deployment)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; :class:`UsageError` where the address is not of this machine or the port is taken."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        expected = "an address of this machine and a free port"
        raise UsageError(f"cannot listen ({error.strerror})", where=f"{host}:{port}", expected=expected) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
