"""The command line. Thin: every command reads settings, asks ``compose`` for what it needs and shows the result."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from sdcp_mono import __version__
from sdcp_mono.cli_trace import traces
from sdcp_mono.models.identity import ModelError
from sdcp_mono.settings import CacheSettings, Common, DrafterSettings, RouterSettings, Settings, VerifierSettings

S = TypeVar("S", bound=Common)

app = typer.Typer(
    name="sdcp-mono",
    help="Speculative decoding coordinated by a protocol. Start with: sdcp-mono serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Fetch, convert and identify models.", no_args_is_help=True)
app.add_typer(models, name="model")
certificates = typer.Typer(help="Certificates for development.", no_args_is_help=True)
app.add_typer(certificates, name="certs")
caches = typer.Typer(help="Look into the tiers and the commit log.", no_args_is_help=True)
app.add_typer(caches, name="cache")
app.add_typer(traces, name="trace")
out = Console()
err = Console(stderr=True)

ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Model id, folder, GGUF file or hub id.")]
DataOption = Annotated[Path | None, typer.Option("--data", help="Where models and logs live.")]
DraftOption = Annotated[
    list[str] | None,
    typer.Option("--draft", "-d", help="none, ngram, quantized or model:DIR; repeatable, asked in order."),
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="bfloat16 (default) or float32.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command()
def serve(
    model: ModelOption = None,
    draft: DraftOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI API.")] = None,
    gateway_port: Annotated[int | None, typer.Option(help="Port of the SDCP gateway (HTTP/2, mutual TLS).")] = None,
    gateway: Annotated[bool | None, typer.Option(help="Serve the roles to others as well.")] = None,
    data: DataOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Serve a model with an OpenAI-compatible API, everything in one process.

    Without --model the default model (SmolLM2-135M-Instruct) is fetched once and served at http://127.0.0.1:8000.
    """
    from sdcp_mono import compose  # torch loads in seconds: only when it is needed

    settings = _settings(
        model=model, draft=draft, host=host, port=port, data_dir=data, dtype=dtype, gateway=gateway,
        gateway_port=gateway_port,
    )  # fmt: skip
    with _failures(), _progress(settings) as progress:
        compose.serve(settings, progress, lambda url: err.print(f"[bold]sdcp-mono[/] answers at [cyan]{url}/v1[/]"))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: ModelOption = None,
    draft: DraftOption = None,
    max_tokens: Annotated[int, typer.Option(help="At most so many output tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    show_rounds: Annotated[
        bool, typer.Option("--show-rounds", help="Colour tokens by origin, then a summary.")
    ] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Generate text with the same engine, without a server; text appears as it is committed."""
    from sdcp_mono import compose
    from sdcp_mono.frontend import terminal

    settings = _settings(model=model, draft=draft, data_dir=data, dtype=dtype)
    wish = terminal.Wish(prompt, max_tokens, temperature, seed, chat=not raw)
    view = terminal.Quiet() if as_json else terminal.Terminal(out, err, show_rounds)
    with _failures():
        with _progress(settings) as progress:
            loaded = compose.load(settings, progress)
        result = asyncio.run(compose.generate(loaded, wish, view))
        if as_json:
            out.print_json(json.dumps(result.as_json(rounds=show_rounds)))
        else:
            view.summary(result)
    if result.error:
        raise typer.Exit(1)


@models.command("pull")
def pull(
    model: Annotated[str | None, typer.Argument(help="Model id, folder, GGUF file or hub id.")] = None,
    data: DataOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch and convert a model once, so that later starts are quick and offline."""
    _show_model(model, data, dtype, as_json)


@models.command("show")
def show(
    model: Annotated[str | None, typer.Argument(help="Model id, folder, GGUF file or hub id.")] = None,
    data: DataOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a model is: its identity digests, sizes and files."""
    _show_model(model, data, dtype, as_json)


def _show_model(model: str | None, data: Path | None, dtype: str | None, as_json: bool) -> None:
    from sdcp_mono.models import source

    settings = _settings(model=model, data_dir=data, dtype=dtype)
    with _failures():
        with _progress(settings) as progress:
            facts = source.describe(source.resolve(settings.model, settings.data_dir, progress, dtype=settings.dtype))
        if as_json:
            out.print_json(json.dumps(facts))
            return
        table = Table(show_header=False, box=None)
        for name, value in facts.items():
            table.add_row(name, _shown(value))
        out.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}  {size:,} bytes" for name, size in value.items())
    return str(value)


@certificates.command("init")
def certs_init(
    directory: Annotated[Path, typer.Argument(help="Where to write; existing good ones are kept.")],
    host: Annotated[list[str] | None, typer.Option(help="Host names and addresses; repeatable.")] = None,
    port: Annotated[int, typer.Option(help="Port of the gateway, as the roles' base URIs name it.")] = 8443,
    ca: Annotated[Path | None, typer.Option(help="Folder of the CA to use; none: the one written to.")] = None,
    instance: Annotated[
        list[str] | None,
        typer.Option(help="NAME=BASE of one instance of a split, repeatable: these instead of one of each role."),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(help="NAME=BASE of a pool, repeatable: one certificate for all instances one label below BASE."),
    ] = None,
) -> None:
    """Make a development CA and one certificate for each role, keys readable by you alone."""
    from sdcp_mono import certs

    with _failures():
        roles = certs.base_uris(port, *(host or ())[:1])
        pools = _bases_by_name("pool", pool)
        if instance or pool:
            roles = _bases_by_name("instance", instance)
        written = certs.init(directory, hosts=tuple(host or certs.HOSTS), roles=roles, pools=pools, ca=ca)
    out.print(f"{directory}: " + (", ".join(written) if written else "everything there is good"))


def _bases_by_name(option: str, given: list[str] | None) -> dict[str, str]:
    from sdcp_mono.core.names import normalise_base

    found = {name: base for name, _, base in (one.partition("=") for one in given or ())}
    if not all(name and base for name, base in found.items()):
        raise ValueError(f"{option}: expected NAME=BASE, such as verifier-0=https://127.0.0.1:9001/verifier/")
    return {name: normalise_base(base) for name, base in found.items()}


@app.command("conformance")
def conformance_(
    url: Annotated[str, typer.Argument(help="Base URI of the role to test, such as https://127.0.0.1:8443/verifier.")],
    role: Annotated[str, typer.Option(help="verifier, drafter or router.")],
    certs: Annotated[
        Path | None,
        typer.Option(help="Who the kit is, as `certs init` makes it; none: the data folder's certs, or certs/kit."),
    ] = None,
    mlc: Annotated[str | None, typer.Option(help="Base URI of a cache that the role trusts.")] = None,
    target: Annotated[str | None, typer.Option(help="Target digest in hex, where the role doesn't tell it.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer digest in hex.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="V of the target.")] = None,
    context: Annotated[int | None, typer.Option(help="Context length of the target.")] = None,
    trigger: Annotated[str | None, typer.Option(help="An OpenAI completions URL that starts a session.")] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT for the roles that the kit plays.")] = "",
    untrusted: Annotated[bool, typer.Option(help="drafter-b must be refused under rule 2.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run these checks only; repeatable.")] = None,
    as_json: JsonOption = False,
    junit: Annotated[Path | None, typer.Option(help="Also write a JUnit file.")] = None,
    data: DataOption = None,
) -> None:
    """Test any SDCP implementation over the wire by acting as the other roles; exit code 1 if a MUST fails."""
    from sdcp_mono.certs import KIT
    from sdcp_mono.conformance import conformance

    if certs is None:
        certs = _settings(data_dir=data).data_dir / "certs"
        if role != "verifier":  # a verifier is called only; towards the others the kit is a peer with its own address
            certs /= KIT
    code = conformance(
        url, role, certs, mlc=mlc, target=target, tokenizer=tokenizer,
        vocab_size=vocab_size, context=context, trigger=trigger, listen=listen, untrusted=untrusted,
        only=tuple(only or ()), as_json=as_json, junit=junit,
    )  # fmt: skip
    raise typer.Exit(code)


BaseOption = Annotated[str | None, typer.Option(help="Base URI of this instance, which its certificate names.")]
PeersOption = Annotated[list[str] | None, typer.Option(help="Base URI of a peer; repeatable.")]
CacheOption = Annotated[str | None, typer.Option(help="Base URI of the cache.")]
TlsOption = Annotated[Path | None, typer.Option(help="Folder of ca.pem and this instance's pair (certs init).")]
NameOption = Annotated[str | None, typer.Option(help="File name of the pair; none: the role's.")]


@app.command()
def router(
    base: BaseOption = None,
    verifiers: PeersOption = None,
    drafters: PeersOption = None,
    cache: CacheOption = None,
    tls_dir: TlsOption = None,
    tls_name: NameOption = None,
    host: Annotated[str | None, typer.Option(help="Address of the OpenAI API.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI API.")] = None,
    model: ModelOption = None,
    data: DataOption = None,
    dtype: DtypeOption = None,
) -> None:
    """The router alone: the OpenAI API, and who works on which session; other roles over gRPC."""
    from sdcp_mono import compose

    flags = {
        "base": base, "verifiers": verifiers, "drafters": drafters,
        "cache": cache, "tls_dir": tls_dir, "tls_name": tls_name,
    }  # fmt: skip
    settings = _settings_of(RouterSettings, **flags, host=host, port=port, model=model, data_dir=data, dtype=dtype)
    _run_role("router", settings, compose.run_router)


@app.command()
def verifier(
    base: BaseOption = None,
    routers: PeersOption = None,
    drafters: PeersOption = None,
    cache: CacheOption = None,
    tls_dir: TlsOption = None,
    tls_name: NameOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    dtype: DtypeOption = None,
) -> None:
    """The verifier alone: the target model, the only one that commits; other roles over gRPC."""
    from sdcp_mono import compose

    flags = {
        "base": base, "routers": routers, "drafters": drafters,
        "cache": cache, "tls_dir": tls_dir, "tls_name": tls_name,
    }  # fmt: skip
    settings = _settings_of(VerifierSettings, **flags, model=model, data_dir=data, dtype=dtype)
    _run_role("verifier", settings, compose.run_verifier)


@app.command()
def drafter(
    base: BaseOption = None,
    routers: PeersOption = None,
    verifiers: PeersOption = None,
    cache: CacheOption = None,
    tls_dir: TlsOption = None,
    tls_name: NameOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    data: DataOption = None,
    dtype: DtypeOption = None,
) -> None:
    """A drafter alone: draft models for a target; other roles over gRPC."""
    from sdcp_mono import compose

    flags = {
        "base": base, "routers": routers, "verifiers": verifiers,
        "cache": cache, "tls_dir": tls_dir, "tls_name": tls_name,
    }  # fmt: skip
    settings = _settings_of(DrafterSettings, **flags, model=model, draft=draft, data_dir=data, dtype=dtype)
    _run_role("drafter", settings, compose.run_drafter)


@caches.command("serve")
def cache_serve(
    base: BaseOption = None,
    routers: PeersOption = None,
    verifiers: PeersOption = None,
    drafters: PeersOption = None,
    tls_dir: TlsOption = None,
    tls_name: NameOption = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the same over HTTP/2, for other engines.")] = None,
    data: DataOption = None,
) -> None:
    """The cache alone: commit logs, objects and KV for the other roles, over gRPC and HTTP."""
    from sdcp_mono import compose

    flags = {"base": base, "tls_dir": tls_dir, "tls_name": tls_name, "http_port": http_port, "data_dir": data}
    settings = _settings_of(CacheSettings, **flags, routers=routers, verifiers=verifiers, drafters=drafters)
    _run_role("cache", settings, compose.run_cache)


@app.command("split-demo")
def split_demo(
    model: ModelOption = None,
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI API.")] = None,
    data: DataOption = None,
    dtype: DtypeOption = None,
) -> None:
    """A cache, a router, two verifiers and two drafters as processes with TLS between them, until Ctrl-C."""
    from sdcp_mono.compose import demo

    settings = _settings(model=model, port=port, data_dir=data, dtype=dtype)
    with _failures(), _progress(settings) as progress:
        demo.run(settings, progress, lambda text: err.print(text, soft_wrap=True, markup=False, highlight=False))


def _run_role(name: str, settings: Any, run: Any) -> None:
    with _failures(), _progress(settings) as progress:
        asyncio.run(
            run(settings, progress, lambda url: err.print(f"[bold]sdcp-mono {name}[/] answers at [cyan]{url}[/]"))
        )


UrlOption = Annotated[str | None, typer.Option(help="A running server; none: the one that settings name.")]


@caches.command("stat")
def cache_stat(url: UrlOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:
    """What each tier of a running server holds, how often it was of use, and how many logs there are.

    Without a running server: what lies in the data folder.
    """
    from sdcp_mono.cache.inspecting import folder_report
    from sdcp_mono.frontend import cache_view

    settings = _settings(data_dir=data)
    with _failures():
        report = cache_view.ask(url or f"http://{settings.host}:{settings.port}")
        if report is None:
            if url:
                raise ValueError(f"{url} doesn't answer; start it with: sdcp-mono serve")
            report = folder_report(settings.data_dir)
        if as_json:
            out.print_json(json.dumps(report))
        else:
            cache_view.show_report(out, report)


@caches.command("ls")
def cache_ls(
    data: DataOption = None,
    limit: Annotated[int, typer.Option(help="Lines of the table; --json has all.")] = 40,
    as_json: JsonOption = False,
) -> None:
    """What the disk tier of a data folder holds; a server may be using it."""
    from sdcp_mono.cache.inspecting import entries
    from sdcp_mono.frontend import cache_view

    settings = _settings(data_dir=data)
    with _failures():
        found = [entry for entry in entries(settings.data_dir) if entry["state"] != "free"]
        if as_json:
            out.print_json(json.dumps(found))
        else:
            cache_view.show_objects(out, found, limit)


@caches.command("fsck")
def cache_fsck(url: UrlOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Read everything in the disk tier and every commit log, and say what is damaged; exit code 1 if anything is.

    Nothing is changed. An SQLite log that a running server has open is read by that server.
    """
    from sdcp_mono.cache.inspecting import entries
    from sdcp_mono.compose import logs as commit_logs
    from sdcp_mono.frontend import cache_view

    settings = _settings(data_dir=data)
    with _failures():
        live = cache_view.ask(url or f"http://{settings.host}:{settings.port}", check=True)
        with _progress(settings) as progress:
            found = list(entries(settings.data_dir, payload=True, progress=progress))
        logs = live["logs"] if live is not None else asyncio.run(commit_logs.check(settings.log, settings.data_dir))
    bad = [entry for entry in found if entry["state"] == "damaged"]
    states = cache_view.counted(found)
    result = {"objects": states, "damaged": bad, "logs": logs}
    if as_json:
        out.print_json(json.dumps(result))
    else:
        for entry in bad:
            out.print(f"[red]damaged[/] {entry['where']}: {entry['detail']}")
        for problem in logs.get("damaged", ()):
            out.print(f"[red]damaged[/] {problem}")
        out.print("objects: " + (", ".join(f"{n:,} {state}" for state, n in states.items()) or "none"))
        out.print(f"logs: {logs['logs']:,} with {logs['records']:,} records")
    raise typer.Exit(1 if bad or logs.get("damaged") else 0)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


def _settings(**flags: Any) -> Settings:
    return _settings_of(Settings, **flags)


def _settings_of(kind: type[S], **flags: Any) -> S:
    """Settings with flags on top; a wrong one ends the command and names the field."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    try:
        return kind(**{name: value for name, value in given.items() if value not in (None, ())})
    except ValidationError as error:
        for problem in error.errors():
            field = ".".join(str(part) for part in problem["loc"])
            err.print(
                f"[red]error[/] {field}: {problem['msg']} (from --{field.replace('_', '-')} or SDCP_{field.upper()})"
            )
        raise typer.Exit(2) from None


@contextmanager
def _failures() -> Iterator[None]:
    """Errors that a person can act on are one line, not a traceback."""
    from sdcp_mono.cache.commit_log import CommitLogUnusable
    from sdcp_mono.cache.segments import TierUnusable
    from sdcp_mono.compose.cluster import RoleDied
    from sdcp_mono.core.problems import Refusal
    from sdcp_mono.frontend.errors import ApiError

    try:
        yield
    except (ModelError, ValueError, OSError, ApiError, Refusal, CommitLogUnusable, TierUnusable, RoleDied) as error:
        err.print(f"[red]error[/] {escape(str(error))}")
        raise typer.Exit(1) from None


@contextmanager
def _progress(settings: Common) -> Iterator[Any]:
    """A progress bar on stderr for work of known size; logging goes through the same console."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(message)s", force=True,
        handlers=[RichHandler(console=err, show_path=False, rich_tracebacks=False)],
    )  # fmt: skip
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars: dict[str, Any] = {}
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:

        def show(description: str, done: int, total: int) -> None:
            if description not in bars:
                bars[description] = bar.add_task(description, total=total or None)
            bar.update(bars[description], completed=done, total=total or None)
            if total and done >= total:
                bar.remove_task(bars.pop(description))

        yield show


def main() -> None:
    """The console script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
