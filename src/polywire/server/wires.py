"""Create the session factories of all protocols from the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from polywire.broker.broker import Broker
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.cursus.factory import CursusFactory
from polywire.protocols.cursus.messages import Dialect as CursusDialect
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.factory import FluxFactory
from polywire.protocols.iggy.context import IggyBroker, IggySettings
from polywire.protocols.iggy.factory import IggyFactory
from polywire.protocols.kafka.context import KafkaRouter, KafkaSettings
from polywire.protocols.kafka.factory import KafkaFactory
from polywire.protocols.kafka07.factory import Kafka07Factory
from polywire.protocols.polywire.factory import PolywireFactory, RoutedPolywireFactory
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.session import SessionFactory
from polywire.routing.broker import RoutedBroker
from polywire.routing.messages import Process
from polywire.routing.resolved import ResolvedBroker
from polywire.routing.session import Part, RouterFactory
from polywire.server.config import AUTO, ServeConfig, parse_address

if TYPE_CHECKING:
    from polywire.server.shard import Shard


def flux_settings(config: ServeConfig) -> FluxSettings:
    advertised = parse_address(config.address_of("flux"))
    return FluxSettings(
        host=advertised.host if advertised is not None else "127.0.0.1",
        port=advertised.port if advertised is not None else 0,
        admin=config.flux_admin,
        strict_leaders=config.flux_strict_leaders,
        pipes_in_arguments=config.flux_pipes,
        replication_factor=config.flux_replication_factor,
        min_isr=config.flux_min_isr,
        line_bytes_max=config.flux_line_bytes_max,
    )


def cursus_settings(config: ServeConfig) -> CursusSettings:
    return CursusSettings(
        dialect=None if config.cursus_dialect == AUTO else CursusDialect(config.cursus_dialect),
        compression="" if config.cursus_compression == AUTO else config.cursus_compression,
        idle_timeout_s=config.cursus_idle_timeout_s,
        repeats_s=60 * config.cursus_dedup_minutes,
    )


def iggy_settings(config: ServeConfig) -> IggySettings:
    return IggySettings(dialect=config.iggy_dialect, data_dir=config.data_dir)


def kafka_settings(config: ServeConfig) -> KafkaSettings:
    advertised = None if config.kafka_advertise == AUTO else parse_address(config.kafka_advertise)
    return KafkaSettings(
        host="" if advertised is None else advertised.host,
        port=0 if advertised is None else advertised.port,
        acks_all=config.kafka_acks_all,
        replication_factor_max=config.kafka_replication_factor_max,
        data_dir=config.data_dir,
    )


def factories_of(broker: Broker, config: ServeConfig) -> list[SessionFactory]:
    """Return the factories of all protocols, for a broker with a single process."""
    flux, cursus = flux_settings(config), cursus_settings(config)
    off_loop = OffLoopQueue(broker.loop)
    return [
        FluxFactory(broker, flux),
        CursusFactory(broker, cursus, off_loop=off_loop),
        IggyFactory(broker, iggy_settings(config)),
        Kafka07Factory(broker, off_loop=off_loop),
        KafkaFactory(broker, kafka_settings(config), off_loop=off_loop),
        PolywireFactory(broker),
    ]


def shard_factories(
    broker: Broker, config: ServeConfig, shard: Shard
) -> tuple[list[SessionFactory], RouterFactory, RoutedBroker]:
    """Return the factories for clients of a shard, the factory for other processes, and the broker of all processes."""
    off_loop = OffLoopQueue(broker.loop)
    routed, settings = RoutedBroker(broker, shard), _led_settings(config)
    cursus = CursusFactory(broker, cursus_settings(config), off_loop=off_loop, places=shard, router=routed)
    flux = FluxFactory(broker, flux_settings(config), router=routed)
    kafka = KafkaFactory(broker, settings, off_loop=off_loop, router=cast(KafkaRouter, ResolvedBroker(routed)))
    executors = {kafka.wire: kafka.executor, cursus.wire: cursus.executor, flux.wire: flux.execute}
    routed.executors.update(executors)

    def process() -> Process:
        return Process(broker.epoch, settings.host, dict(shard.ports), kafka.own.cluster_id if shard.own == 0 else "")

    iggy = IggyFactory(cast(IggyBroker, routed), iggy_settings(config), parts=routed)
    called = *iggy.called, *cursus.called, *kafka.called
    parts = {name: Part(name, target, functions) for name, target, functions in called}
    outside: list[SessionFactory] = [
        flux,
        cursus,
        iggy,
        kafka,
        Kafka07Factory(routed, off_loop=off_loop),
        RoutedPolywireFactory(routed),
    ]
    return outside, RouterFactory(broker, shard.key, process, routed.executors, parts), routed


def _led_settings(config: ServeConfig) -> KafkaSettings:
    """Return the settings of Kafka for a shard: clients connect to the port of the process that leads a partition.

    On a data directory, they use the host that they connected to. With a bucket, each machine has its own host.
    """
    settings = kafka_settings(config)
    if settings.host or not config.bucket:
        return settings
    at = parse_address(config.kafka) or parse_address(config.any_wire)
    return settings if at is None else replace(settings, host=config.reached_at(at))
