"""A part of the suite through a broker that only forwards: the second standby of three brokers on one bucket.

``make three-brokers`` runs all of it through each of the three.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.behaviour import test_cross_wire as cross_wire
from tests.behaviour import test_disconnects as disconnects
from tests.behaviour import test_exactly_once as exactly_once
from tests.behaviour import test_groups as groups
from tests.behaviour import test_records as records
from tests.three_brokers import Brokers, one_or_three

test_produce_then_fetch = records.test_produce_then_fetch
test_equal_keys_stay_in_order_in_one_partition = records.test_equal_keys_stay_in_order_in_one_partition
test_fetch_of_a_missing_partition_is_refused = records.test_fetch_of_a_missing_partition_is_refused
test_a_large_value = records.test_a_large_value
test_ten_thousand_records = records.test_ten_thousand_records
test_a_waiting_fetch_returns_new_records = records.test_a_waiting_fetch_returns_new_records
test_a_deleted_topic_starts_again_empty = records.test_a_deleted_topic_starts_again_empty
test_two_members_share_without_overlap = groups.test_two_members_share_without_overlap
test_members_of_different_protocols_share_a_group = groups.test_members_of_different_protocols_share_a_group
test_concurrent_writers_keep_their_own_order = cross_wire.test_concurrent_writers_keep_their_own_order
test_disconnecting_within_a_request = disconnects.test_disconnecting_within_a_request
test_a_duplicate_batch_is_detected_after_a_kill = exactly_once.test_a_duplicate_batch_is_detected_after_a_kill


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with one_or_three(tmp_path_factory.mktemp("through"), place="standby-2") as brokers:
        yield brokers


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Brokers]:
    with one_or_three(tmp_path, place="standby-2") as brokers:
        yield brokers
