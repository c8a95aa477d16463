"""``polywire pipeline``: list, describe and run ready-made Spark jobs, and begin a project of Spark's declarative pipelines.

Promises: a setting that is wrong, or a topic there is not, is refused before Spark is started; what ends a run is told on one line; a run
that left something out says so and does not end with 0.
Must not know: what a pipeline does.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from polywire.choices import missing
from polywire.cli.connection import ADDRESS_DEFAULT, run_with_client
from polywire.cli.output import Failed, ListFormat, note, notes, print_list
from polywire.cli.usage import EXIT_FAILED, examples
from polywire.client.base import WireClient
from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.names import unescape
from polywire.spark.pipelines import project
from polywire.spark.pipelines.registry import PIPELINES, kind_name, pipeline, read_settings, settings_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_INCOMPLETE: Final = EXIT_FAILED
OUR_ERRORS: Final = "polywire.errors."  # how a Python trace names them

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
            "default": "(needed)" if setting.required else setting.default,
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
        Show what Spark logs, and where an error came from.
    """
    function = pipeline(name).load()
    settings = read_settings(function, {**_address(function), **_pairs("--set", set)})
    chosen = _pairs("--conf", conf)
    _check_topics(settings)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from polywire.spark.progress import progress_bar
    from polywire.spark.sessions import session

    borrowed = SparkSession.getActiveSession() is not None
    with notes.status("starting Spark"):
        spark = _started(lambda: session(f"polywire-{name}", master=master, **chosen))
    if not trace and not borrowed:
        spark.sparkContext.setLogLevel("OFF")  # an error is told below, once
    try:
        if "on_progress" not in inspect.signature(function).parameters:
            with notes.status(f"running {name}"):
                return _tell(name, function(spark, **settings))
        with progress_bar(name, console=notes) as on_progress:
            ran = function(spark, **settings, on_progress=on_progress)
        return _tell(name, ran)
    except PySparkException as error:
        if trace:
            raise
        raise Failed(f"pipeline failed name={name}: {cause(str(error))} (--trace shows more)") from error
    finally:
        if not borrowed:
            spark.stop()


@app.command(
    help_epilogue=examples("polywire pipeline init orders", "polywire pipeline init orders --topic shop.orders")
)
def init(directory: Path, *, topic: str = "orders", address: str = ADDRESS_DEFAULT) -> None:
    """Create a Spark Declarative Pipelines project that reads a topic, counts its records and writes to another.

    Parameters
    ----------
    directory
        Directory to create; must not exist or be empty.
    topic
        Topic to read.
    address
        Broker to read it from.
    """
    made = project.make(directory, topic=topic, address=address.removeprefix("polywire://"))
    note(f"created project={directory} files={','.join(made)}")
    note(f"next: cd {directory} && SPARK_CONF_DIR=conf spark-pipelines run (needs pyspark[pipelines])")


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"{option} takes NAME=VALUE got={text!r}")
        found[name.strip()] = value
    return found


def _address(function: Any) -> dict[str, str]:
    """The broker's address where the pipeline has one and none is set."""
    if "address" not in inspect.signature(function).parameters:
        return {}
    return {"address": os.environ.get("POLYWIRE_ADDRESS", ADDRESS_DEFAULT).removeprefix("polywire://")}


def _check_topics(settings: Mapping[str, Any]) -> None:
    """Raise Missing(TOPIC_MISSING) for a topic to read that the broker does not have."""
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


def _started(start: Callable[[], SparkSession]) -> SparkSession:
    try:
        return start()
    except Unavailable as error:  # no Java: no broker has said so
        raise Failed(error.message) from error


def cause(text: str) -> str:
    """What a trace of Spark's is about: the error of ours that it quotes, or its first line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [found for line in lines if (found := line.partition(OUR_ERRORS)[2].partition(": ")[2])]
    return ours[-1] if ours else lines[0] if lines else "no reason was given"


def _tell(name: str, ran: Any) -> int:
    """Say what was done and answer the exit code."""
    corrupt = getattr(ran, "corrupt", 0)
    note(f"ran pipeline={name} records={ran.records} batches={ran.batches}{f' corrupt={corrupt}' if corrupt else ''}")
    for problem in ran.problems:
        note(f"warning: {problem}", style="yellow")
    return EXIT_INCOMPLETE if ran.problems else 0
