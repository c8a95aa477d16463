"""Start Spark with suitable settings (docs/spark/cluster.md explains them).

The session finds Java and ``format("polywire")``, and runs small micro-batches in tens of milliseconds. Every setting
can be overridden.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

import polywire
from polywire.errors import ErrorCode, Invalid
from polywire.spark.java import cache_directory, find_java, write_file
from polywire.spark.source import PolywireDataSource

PYSPARK_VERSION_MIN: Final = (4, 2)  # first version with latestOffset(start, limit) and availableNow for Python sources

PYTHON_OF_THE_PATH: Final = "python3"  # what workers run by default, without PYSPARK_PYTHON

SETTINGS: Final = {
    "spark.python.unix.domain.socket.enabled": "true",  # a Python task takes 12 ms instead of 52
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
LOCAL_SETTINGS: Final = {
    # On local paths the default class starts chmod and readlink some twenty times per micro-batch. A rename is atomic
    # as well.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # Host names that cannot be resolved are common, and only this machine needs to reach a local driver.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
PARTITIONS: Final = "spark.sql.shuffle.partitions"
SPARKS_PARTITIONS: Final = "200"  # Spark's default
BATCH_PARTITIONS: Final = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"  # PARTITIONS by default
HOME_PARTS: Final = ("bin", "conf", "jars", "sbin")  # of Spark's home, without its Python part

_LOGGING: Final = """rootLogger.level = error
rootLogger.appenderRef.console.ref = console
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def session(app_name: str, *, master: str | None = None, **conf: str) -> SparkSession:
    """Return the Spark session of this process, created by the first call, with the source registered.

    Args:
        app_name: name of the application on Spark's pages.
        master: where Spark runs. None uses the environment's setting, or else this machine (``local[*]``).
        **conf: Spark's settings by name. They override all settings made here.

    Raises:
        Unavailable: no Java is found.
        Invalid: pyspark is too old.

    Example:
        spark = session("orders", **{"spark.sql.shuffle.partitions": "8"})
    """
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    if version < PYSPARK_VERSION_MIN:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the installed pyspark is too old installed={pyspark.__version__} needed={'.'.join(map(str, PYSPARK_VERSION_MIN))}",
        )
    local = _is_local(master or conf.get("spark.master"))
    if not _launched_from_outside():
        _prepare_environment()
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for key, value in settings(local=local, conf=conf).items():
        builder = builder.config(key, value)
    with _home(local=local):
        spark = builder.getOrCreate()
    context = _local_context(spark)
    if context is not None:
        if not _launched_from_outside():
            _run_this_python(context)
        _partition_by_cores(spark, context)
    spark.dataSource.register(PolywireDataSource)
    return spark


def settings(*, local: bool, conf: dict[str, str]) -> dict[str, str]:
    """Return all settings of a new session."""
    quiet = f"-Dlog4j2.configurationFile={_logging_file().as_uri()}"
    chosen = {**SETTINGS, **(LOCAL_SETTINGS if local else {}), **conf}
    chosen[JAVA_OPTIONS] = f"{quiet} {conf[JAVA_OPTIONS]}" if JAVA_OPTIONS in conf else quiet
    return chosen


def _is_local(master: str | None) -> bool:
    return (master or os.environ.get("MASTER") or "local").startswith("local")


def _launched_from_outside() -> bool:
    """Return whether spark-submit started this process, or Spark runs remotely.

    In both cases this process must not set Java or the environment.
    """
    return "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ


def _prepare_environment() -> None:
    """Set the environment that the JVM and its Python workers inherit: Java, this Python, and a path with this package."""
    os.environ["JAVA_HOME"] = str(find_java().home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    source = str(Path(polywire.__path__[0]).resolve().parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if source not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([source, *paths])


def make_home(directory: Path) -> Path | None:
    """Return a home of Spark, made in ``directory``, whose Python processes import the installed pyspark.

    Spark's own home also has pyspark as a zip file without byte code. Python processes prefer it, and each compiles it
    again: 1.0 s of processor time instead of 0.3 s.

    Returns:
        None if pyspark is not in this Python's packages, or if links cannot be made.
    """
    package = Path(pyspark.__path__[0])
    packages = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    if str(package.parent) not in packages or not (package / "jars").is_dir():
        return None
    home = directory / f"spark-{hashlib.sha256(str(package).encode()).hexdigest()[:16]}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        for part in filter(Path.exists, map(package.joinpath, HOME_PARTS)):
            with suppress(FileExistsError):
                (home / part.name).symlink_to(part)
    except OSError:
        return None
    return home


@contextmanager
def _home(*, local: bool) -> Iterator[None]:
    """Start Spark with the home of ``make_home``, if its workers run this Python and the user has not chosen a home."""
    runs_this = local and os.environ.get("PYSPARK_PYTHON") == sys.executable and "SPARK_HOME" not in os.environ
    home = make_home(cache_directory()) if runs_this and not _launched_from_outside() else None
    if home is None:
        yield
        return
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield
    finally:
        os.environ.pop("SPARK_HOME", None)  # other programs that this process starts may need the whole home


def _local_context(spark: SparkSession) -> SparkContext | None:
    """Return the context of a session that runs on this machine. A Spark Connect session has none."""
    context: SparkContext | None = getattr(spark, "sparkContext", None)
    return context if context is not None and _is_local(context.master) else None


def _run_this_python(context: SparkContext) -> None:
    """Make the workers of an existing session run this Python, because the default Python may lack this package.

    If the user has chosen a Python, it is not changed.
    """
    if context.pythonExec == PYTHON_OF_THE_PATH:
        context.pythonExec = sys.executable


def _partition_by_cores(spark: SparkSession, context: SparkContext) -> None:
    """Let stateful streaming queries have a partition for each core, unless the user has set a number.

    In every micro-batch each partition costs a task and a file of state. Batch queries keep the number of partitions
    that they begin with, because Spark merges small ones.
    """
    if context.getConf().contains(PARTITIONS) or spark.conf.get(PARTITIONS) != SPARKS_PARTITIONS:
        return
    if spark.conf.get(BATCH_PARTITIONS, None) is None:
        spark.conf.set(BATCH_PARTITIONS, SPARKS_PARTITIONS)
    spark.conf.set(PARTITIONS, str(context.defaultParallelism))


def _logging_file() -> Path:
    """Write the file from which Spark reads its logging configuration, and return its path.

    Spark then logs only errors, to stderr.
    """
    file = cache_directory() / "log4j2.properties"
    if not file.exists() or file.read_text(encoding="utf-8") != _LOGGING:
        write_file(file, _LOGGING, mode=0o644)
    return file
