"""``polywire pipeline``: list, describe and run prebuilt Spark jobs, and create Spark Declarative Pipelines projects.

* Wrong settings and missing topics are reported before Spark starts.
* The error of a failed run is one line.
* A run that skipped records reports them, and its exit code is not 0.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from polywire.choices import missing
from polywire.cli.connection import ADDRESS_DEFAULT, run_with_client
from polywire.cli.output import Failed, ListFormat, note, notes, print_list
from polywire.cli.progress import counted, reported
from polywire.cli.usage import EXIT_FAILED, examples
from polywire.client.base import WireClient
from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.names import unescape
from polywire.spark.pipelines import project
from polywire.spark.pipelines.registry import PIPELINES, Setting, kind_name, pipeline, read_settings, settings_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from polywire.spark.progress import BatchProgress, OnProgress

EXIT_INCOMPLETE: Final = EXIT_FAILED
OUR_ERRORS: Final = "polywire.errors."  # prefix of Polywire's errors in a Python traceback

app = App(
    name="pipeline",
    help_epilogue=examples(
        "polywire pipeline list",
        "polywire pipeline describe land",
        "polywire pipeline run land -s topic=orders -s path=orders -s checkpoint=state",
    ),
)

Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


Name = Annotated[str, Parameter(help="Name of the pipeline.")]


@app.command(name="list", help_epilogue=examples("polywire pipeline list"))
def list_pipelines(*, output: Output = ListFormat.TABLE) -> None:
    """List the available pipelines."""
    rows = [{"pipeline": known.name, "does": known.summary} for known in PIPELINES]
    print_list(rows, columns=("pipeline", "does"), form=output)


@app.command(help_epilogue=examples("polywire pipeline describe windows"))
def describe(name: Name, *, output: Output = ListFormat.TABLE) -> None:
    """Show the settings of a pipeline."""
    rows = [
        {
            "setting": setting.name,
            "takes": " or ".join(kind_name(kind) for kind in setting.kinds),
            "default": _default(setting),
            "means": setting.meaning,
        }
        for setting in settings_of(pipeline(name).load())
    ]
    print_list(rows, columns=("setting", "takes", "default", "means"), form=output)


@app.command(
    help_epilogue=examples(
        "polywire pipeline run land -s topic=orders -s path=orders -s checkpoint=state",
        "polywire pipeline run quality -s topic=orders -s report=orders.html",
        "polywire pipeline run quality --master spark://head:7077 -s topic=orders",
    )
)
def run(
    name: Name,
    *,
    set: Annotated[tuple[str, ...], Parameter(name=("--set", "-s"))] = (),
    master: str | None = None,
    conf: Annotated[tuple[str, ...], Parameter(name=("--conf", "-c"))] = (),
    trace: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run a pipeline and show its progress. Exits with 1 if records were skipped or problems were found.

    Parameters
    ----------
    set
        Pipeline setting as NAME=VALUE; can be repeated. The address defaults to POLYWIRE_ADDRESS.
    master
        Spark master URL: local[2], spark://HOST:PORT, yarn, k8s://…
    conf
        Spark setting as NAME=VALUE; can be repeated.
    trace
        Show Spark's log, and the traceback of an error.
    """
    _search_here()
    function = pipeline(name).load()
    settings = read_settings(function, {**_address(function), **_pairs("--set", set)})
    chosen = _pairs("--conf", conf)
    _check_topics(settings)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from polywire.spark.progress import progress_bar
    from polywire.spark.sessions import session

    is_shared = SparkSession.getActiveSession() is not None  # the caller created the session and stops it itself
    if not trace:
        logging.getLogger().addFilter(_is_not_of_py4j)
    with reported("starting Spark"):
        spark = _started(lambda: session(f"polywire-{name}", master=master, **chosen))
    if not trace and not is_shared:
        spark.sparkContext.setLogLevel("OFF")  # the error is printed below on one line
    try:
        if "on_progress" not in inspect.signature(function).parameters:
            with reported(f"running {name}"):
                return _report(name, function(spark, **settings))
        with progress_bar(name, console=notes()) if notes().is_terminal else _progress_lines(name) as on_progress:
            run_result = function(spark, **settings, on_progress=on_progress)
        return _report(name, run_result)
    except PySparkException as error:
        if trace:
            raise
        raise Failed(f"pipeline failed: {cause(str(error))} (use --trace for details) name={name}") from error
    finally:
        if not is_shared:
            spark.stop()


@app.command(
    help_epilogue=examples("polywire pipeline init orders", "polywire pipeline init orders --topic shop.orders")
)
def init(directory: Path, *, topic: str = "orders", address: str = ADDRESS_DEFAULT) -> None:
    """Create a Spark Declarative Pipelines project that reads a topic, counts its records and writes to another topic.

    Parameters
    ----------
    directory
        Directory to create; it must not exist, or must be empty.
    topic
        Topic to read.
    address
        Address of the broker.
    """
    files = project.make(directory, topic=topic, address=address.removeprefix("polywire://"))
    note(f"created project={directory} files={','.join(files)}")
    note(f"next: cd {directory} && SPARK_CONF_DIR=conf spark-pipelines run (needs pyspark[pipelines])")


def _default(setting: Setting) -> str | None:
    """Return the default of a setting for the command, which always sets the address itself."""
    if setting.name == "address":
        return f"POLYWIRE_ADDRESS, or {ADDRESS_DEFAULT.removeprefix('polywire://')}"
    return "(required)" if setting.required else setting.default


def _search_here() -> None:
    """Make modules in the current folder importable for settings such as ``parse=module:function``.

    The folder is searched last, so that its files never replace installed modules.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"value is not NAME=VALUE option={option} got={text!r}")
        pairs[name.strip()] = value
    return pairs


def _address(function: Any) -> dict[str, str]:
    if "address" not in inspect.signature(function).parameters:
        return {}
    return {"address": os.environ.get("POLYWIRE_ADDRESS", ADDRESS_DEFAULT).removeprefix("polywire://")}


def _check_topics(settings: Mapping[str, Any]) -> None:
    address, topics = settings.get("address"), settings.get("topic")
    if not isinstance(address, str) or not isinstance(topics, str):
        return
    names = [unescape(part.strip()) for part in topics.split(",") if part.strip()]

    async def work(client: WireClient) -> None:
        known = {topic.name for topic in await client.topics()}
        for name in names:
            if name not in known:
                raise missing(ErrorCode.TOPIC_MISSING, "topic", name, known, facts=f"address={address}")

    run_with_client(f"polywire://{address}", work)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Return False for the tracebacks that py4j logs after Ctrl-C. It uses the root logger."""
    return record.module not in ("java_gateway", "clientserver")


@contextmanager
def _progress_lines(name: str) -> Iterator[OnProgress]:
    records = 0

    def show(batch: BatchProgress) -> None:
        nonlocal records
        records += batch.records
        show_count(records, "" if batch.lag is None else f", lag {batch.lag:,}")

    with counted(f"running {name}") as show_count:
        yield show


def _started(start: Callable[[], SparkSession]) -> SparkSession:
    try:
        return start()
    except Unavailable as error:  # Java is missing; the error's code would look as if a broker had reported it
        raise Failed(error.message) from error


def cause(text: str) -> str:
    """Return the cause of a failure from a Spark traceback: the last Polywire error in it, or else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [message for line in lines if (message := line.partition(OUR_ERRORS)[2].partition(": ")[2])]
    return ours[-1] if ours else lines[0] if lines else "Spark gave no reason"


def _report(name: str, run_result: Any) -> int:
    corrupt = getattr(run_result, "corrupt", 0)
    facts = f"records={run_result.records} batches={run_result.batches}{f' corrupt={corrupt}' if corrupt else ''}"
    note(f"ran pipeline={name} {facts}")
    for problem in run_result.problems:
        note(f"warning: {problem}", style="yellow")
    return EXIT_INCOMPLETE if run_result.problems else 0
