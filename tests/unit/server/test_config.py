"""Settings of ``polywire serve`` are checked before anything is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polywire.broker.settings import MEBI, BrokerSettings
from polywire.errors import ErrorCode, Invalid
from polywire.server.config import STORED_AT_ONCE_BYTES, Address, ServeConfig, parse_address
from polywire.types import Level
from tests.unit.server.peers import SILENT


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("localhost:9092", Address("localhost", 9092)),
        ("[::1]:65535", Address("::1", 65535)),
        ("broker.example:1", Address("broker.example", 1)),
        ("off", None),
    ],
)
def test_addresses(text: str, address: Address | None) -> None:
    assert parse_address(text) == address
    assert address is None or str(address) == text


@pytest.mark.parametrize("text", ["", "9092", ":9092", "host", "host:", "host:x", "host:-1", "::1:9092", "h:٣"])
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(Invalid, match=r"address is invalid \(use HOST:PORT or off\)"):
        parse_address(text)


@pytest.mark.parametrize("text", ["host:65536", "[::1]:99999", "host:" + "1" * 5000])
def test_invalid_ports(text: str) -> None:
    with pytest.raises(Invalid, match="port is above 65535"):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert Address(host, 1).is_loopback is loopback


def test_disabled_listeners_are_not_returned() -> None:
    config = replace(SILENT, polywire="127.0.0.1:1", any_wire="[::1]:2")
    assert config.listeners() == {"polywire": Address("127.0.0.1", 1), "any": Address("::1", 2)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SILENT, "all listeners are off"),
        (
            ServeConfig(flux="0.0.0.0:9092"),
            "needs --users or --insecure, because no users are configured listener=flux address=0.0.0.0:9092",
        ),
        (
            ServeConfig(any_wire="[::]:9092"),
            "needs --users or --insecure, because no users are configured listener=any",
        ),
        (ServeConfig(durability=Level.MEMORY), "durability is invalid (use written or synced)"),
        (ServeConfig(idle_poll_us=10_001), "out of range name=idle_poll_us value=10001 limit=10000"),
        (ServeConfig(retention_hours=-1.0), "out of range name=retention_hours"),
        (ServeConfig(retention_hours=float("nan")), "out of range name=retention_hours"),
        (ServeConfig(offsets_retention_hours=-1.0), "out of range name=offsets_retention_hours"),
        (ServeConfig(offsets_retention_hours=float("nan")), "out of range name=offsets_retention_hours"),
        (ServeConfig(offsets_retention_hours=float("inf")), "out of range name=offsets_retention_hours"),
        (ServeConfig(drain_timeout_s=float("nan")), "out of range name=drain_timeout"),
        (ServeConfig(node_timeout_s=60.1), "out of range name=node_timeout_s"),
        (ServeConfig(node_timeout_s=0.9), "node_timeout_s is too small got=0.9 least=1.0"),
        (ServeConfig(retention_mib=-1), "out of range name=retention_mib"),
        (ServeConfig(memory_mib=255), "use 256 or more for each process"),
        (ServeConfig(memory_mib=1023, processes=4), "use 256 or more for each process"),
        (ServeConfig(memory_mib=-1), "out of range name=memory_mib"),
        (ServeConfig(polywire="9555"), "address is invalid (use HOST:PORT or off)"),
        (
            ServeConfig(slot_bytes=16 * MEBI),
            "too small for the largest request of kafka (use --slot-mib 17 or more",
        ),
        (
            replace(SILENT, tls={"polywire": "127.0.0.1:0"}, slot_bytes=16 * MEBI, tls_certificate=Path()),
            "--slot-mib 17",
        ),
        (replace(SILENT, any_wire="127.0.0.1:0", slot_bytes=16 * MEBI), "--slot-mib 17"),
        (replace(SILENT, iggy="127.0.0.1:0", slot_bytes=10 * MEBI), "--slot-mib 11"),
        (replace(SILENT, cursus="127.0.0.1:0", slot_bytes=9 * MEBI), "--slot-mib 10"),
        (replace(SILENT, kafka07="127.0.0.1:0", slot_bytes=MEBI), "--slot-mib 2"),
        (replace(SILENT, flux="127.0.0.1:0", slot_bytes=0), "--slot-mib 2"),
    ],
)
def test_invalid_settings_are_rejected(config: ServeConfig, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        config.listeners()
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("wire", "slot_mib"), [("polywire", 17), ("kafka", 17), ("iggy", 11), ("cursus", 10), ("kafka07", 2), ("flux", 2)]
)
def test_the_smallest_journal_file_size_of_each_protocol(wire: str, slot_mib: int) -> None:
    config = replace(SILENT, **{wire: "127.0.0.1:0"}, slot_bytes=slot_mib * MEBI)  # type: ignore[arg-type]
    assert list(config.listeners()) == [wire]
    assert config.log_settings().batch_bytes_max >= STORED_AT_ONCE_BYTES[wire]


def test_retention_settings_reach_the_broker() -> None:
    settings = ServeConfig(retention_hours=1.5, retention_mib=3).broker_settings()
    assert (settings.retention_age_us, settings.retention_bytes) == (5_400_000_000, 3 * 1024 * 1024)
    config = ServeConfig(memory_mib=4096)
    assert config.broker_settings() == BrokerSettings(tables_url=config.tables_at)


def test_caches_journal_and_state_fit_the_memory() -> None:
    half = ServeConfig(memory_mib=512)
    log, state = half.log_settings(), half.broker_settings()
    assert (log.cache_bytes, log.slot_bytes, state.state_bytes_max) == (88 * MEBI, 22 * MEBI, 44 * MEBI)
    least = ServeConfig(memory_mib=256).log_settings()
    assert least.slot_bytes == 17 * MEBI, "a request of every protocol fits"
    own = ServeConfig(memory_mib=1024, cache_mib=10, state_mib=20, slot_bytes=18 * MEBI)
    assert own.log_settings().cache_bytes == 10 * MEBI
    assert own.log_settings().slot_bytes == 18 * MEBI
    assert own.broker_settings().state_bytes_max == 20 * MEBI


def test_tables_are_in_the_bucket_or_the_data_directory() -> None:
    assert ServeConfig(data_dir=Path("/data/a b")).tables_at == "file:///data/a%20b/tables"
    assert ServeConfig(bucket="s3://bucket/log/").tables_at == "s3://bucket/log/tables"
    assert ServeConfig(bucket="s3://bucket/log", tables_url="file:///tables/").tables_at == "file:///tables"
    for url in ("nosuch://x", "tables", "file://host/tables", "s3://key:secret@bucket"):
        with pytest.raises(Invalid):
            ServeConfig(tables_url=url).broker_settings()


def test_insecure_allows_all_addresses() -> None:
    config = ServeConfig(flux="0.0.0.0:9092", insecure=True)
    assert config.listeners()["flux"] == Address("0.0.0.0", 9092)


@pytest.mark.parametrize("limit", [-1, 0, 1023, (1 << 20) + 1])
def test_the_limit_of_flux_lines_has_a_range(limit: int) -> None:
    with pytest.raises(Invalid):
        replace(SILENT, flux="127.0.0.1:0", flux_line_bytes_max=limit).listeners()
