"""The table of Kafka's messages: every field in every supported version. The module ``schema`` reads it.

An entry has the message's number, name, versions and first flexible version, then its request (``>``) and its response
(``<``). Fields are written as follows::

    name type       a field. Types: b (bool), i8 to i64, f64, id (16 bytes), s (text), bytes, recs (record batches, as bytes)
    name []type     an array of plain values
    name[ ... ]     an array of structures; name{ ... } is one structure
    type?           may be null; ``?2+`` from version 2 on
    type=-1         the value if the version lacks the field or the tag is missing; without it 0, empty or null
    @5+ @2-4 @3     the versions with this field, within those of the enclosing structure
    name#0          a tagged field
"""

from __future__ import annotations

from typing import Final

DEFINITIONS: Final = """
0 Produce 3-13 flexible 9
    > transactional_id s?, acks i16, timeout_ms i32, topics[ name s @3-12, topic_id id @13+, partitions[ index i32,
        records recs? ] ]
    < responses[ name s @3-12, topic_id id @13+, partitions[ index i32, error i16, base_offset i64=-1,
        log_append_time_ms i64=-1, log_start_offset i64=-1 @5+, record_errors[ batch_index i32, message s? ] @8+,
        message s? @8+, current_leader#0{ leader_id i32=-1, leader_epoch i32=-1 } @10+ ] ], throttle_ms i32,
        node_endpoints#0[ node_id i32, host s, port i32, rack s? ] @10+
1 Fetch 4-18 flexible 12
    > cluster_id#0 s? @12+, replica_id i32=-1 @4-14, replica_state#1{ replica_id i32=-1, replica_epoch i64=-1 }
        @15+, max_wait_ms i32, min_bytes i32, max_bytes i32=2147483647, isolation_level i8, session_id i32 @7+,
        session_epoch i32=-1 @7+, topics[ topic s @4-12, topic_id id @13+, partitions[ partition i32,
        current_leader_epoch i32=-1 @9+, fetch_offset i64, last_fetched_epoch i32=-1 @12+, log_start_offset i64=-1
        @5+, partition_max_bytes i32, replica_directory_id#0 id @17+, high_watermark#1 i64=9223372036854775807 @18+
        ] ], forgotten[ topic s @7-12, topic_id id @13+, partitions []i32 ] @7+, rack_id s @11+
    < throttle_ms i32, error i16 @7+, session_id i32 @7+, responses[ topic s @4-12, topic_id id @13+, partitions[
        index i32, error i16, high_watermark i64, last_stable_offset i64=-1, log_start_offset i64=-1 @5+,
        diverging_epoch#0{ epoch i32=-1, end_offset i64=-1 } @12+, current_leader#1{ leader_id i32=-1, leader_epoch
        i32=-1 } @12+, snapshot_id#2{ end_offset i64=-1, epoch i32=-1 } @12+, aborted_transactions[ producer_id i64,
        first_offset i64 ]?, preferred_read_replica i32=-1 @11+, records recs? ] ], node_endpoints#0[ node_id i32,
        host s, port i32, rack s? ] @16+
2 ListOffsets 1-11 flexible 6
    > replica_id i32=-1, isolation_level i8 @2+, topics[ name s, partitions[ index i32, current_leader_epoch i32=-1
        @4+, timestamp i64 ] ], timeout_ms i32 @10+
    < throttle_ms i32 @2+, topics[ name s, partitions[ index i32, error i16, timestamp i64=-1, offset i64=-1,
        leader_epoch i32=-1 @4+ ] ]
3 Metadata 0-13 flexible 9
    > topics[ topic_id id @10+, name s?10+ ]?1+, may_create b=1 @4+, want_cluster_operations b @8-10,
        want_topic_operations b @8+
    < throttle_ms i32 @3+, brokers[ node_id i32, host s, port i32, rack s? @1+ ], cluster_id s? @2+, controller_id
        i32=-1 @1+, topics[ error i16, name s?12+, topic_id id @10+, is_internal b @1+, partitions[ error i16, index
        i32, leader_id i32, leader_epoch i32=-1 @7+, replica_nodes []i32, isr_nodes []i32, offline_replicas []i32
        @5+ ], operations i32=-2147483648 @8+ ], cluster_operations i32=-2147483648 @8-10, error i16 @13+
8 OffsetCommit 2-10 flexible 8
    > group_id s, generation i32=-1, member_id s, instance_id s? @7+, retention_time_ms i64=-1 @2-4, topics[ name s
        @2-9, topic_id id @10+, partitions[ index i32, offset i64, leader_epoch i32=-1 @6+, metadata s? ] ]
    < throttle_ms i32 @3+, topics[ name s @2-9, topic_id id @10+, partitions[ index i32, error i16 ] ]
9 OffsetFetch 1-10 flexible 6
    > group_id s @1-7, topics[ name s, indexes []i32 ]?2+ @1-7, groups[ group_id s, member_id s? @9+, member_epoch
        i32=-1 @9+, topics[ name s @8-9, topic_id id @10+, indexes []i32 ]? ] @8+, require_stable b @7+
    < throttle_ms i32 @3+, topics[ name s, partitions[ index i32, offset i64, leader_epoch i32=-1 @5+, metadata s?,
        error i16 ] ] @1-7, error i16 @2-7, groups[ group_id s, topics[ name s @8-9, topic_id id @10+, partitions[
        index i32, offset i64, leader_epoch i32=-1, metadata s?, error i16 ] ], error i16 ] @8+
10 FindCoordinator 0-6 flexible 3
    > key s @0-3, key_type i8 @1+, coordinator_keys []s @4+
    < throttle_ms i32 @1+, error i16 @0-3, message s? @1-3, node_id i32 @0-3, host s @0-3, port i32 @0-3,
        coordinators[ key s, node_id i32, host s, port i32, error i16, message s? ] @4+
11 JoinGroup 0-9 flexible 6
    > group_id s, session_timeout_ms i32, rebalance_timeout_ms i32=-1 @1+, member_id s, instance_id s? @5+,
        protocol_type s, protocols[ name s, metadata bytes ], reason s? @8+
    < throttle_ms i32 @2+, error i16, generation_id i32=-1, protocol_type s? @7+, protocol_name s?7+, leader s,
        skip_assignment b @9+, member_id s, members[ member_id s, instance_id s? @5+, metadata bytes ]
12 Heartbeat 0-4 flexible 4
    > group_id s, generation_id i32, member_id s, instance_id s? @3+
    < throttle_ms i32 @1+, error i16
13 LeaveGroup 0-5 flexible 4
    > group_id s, member_id s @0-2, members[ member_id s, instance_id s?, reason s? @5+ ] @3+
    < throttle_ms i32 @1+, error i16, members[ member_id s, instance_id s?, error i16 ] @3+
14 SyncGroup 0-5 flexible 4
    > group_id s, generation_id i32, member_id s, instance_id s? @3+, protocol_type s? @5+, protocol_name s? @5+,
        assignments[ member_id s, assignment bytes ]
    < throttle_ms i32 @1+, error i16, protocol_type s? @5+, protocol_name s? @5+, assignment bytes
15 DescribeGroups 0-6 flexible 5
    > groups []s, want_operations b @3+
    < throttle_ms i32 @1+, groups[ error i16, message s? @6+, group_id s, group_state s, protocol_type s,
        protocol_data s, members[ member_id s, instance_id s? @4+, client_id s, client_host s, member_metadata
        bytes, member_assignment bytes ], operations i32=-2147483648 @3+ ]
16 ListGroups 0-5 flexible 3
    > states_filter []s @4+, types_filter []s @5+
    < throttle_ms i32 @1+, error i16, groups[ group_id s, protocol_type s, group_state s @4+, group_type s @5+ ]
17 SaslHandshake 0-1
    > mechanism s
    < error i16, mechanisms []s
18 ApiVersions 0-4 flexible 3
    > client_software_name s @3+, client_software_version s @3+
    < error i16, api_keys[ api_key i16, min_version i16, max_version i16 ], throttle_ms i32 @1+,
        supported_features#0[ name s, min_version i16, max_version i16 ] @3+, finalized_features_epoch#1 i64=-1 @3+,
        finalized_features#2[ name s, max_version_level i16, min_version_level i16 ] @3+, zk_migration_ready#3 b @3+
19 CreateTopics 2-7 flexible 5
    > topics[ name s, num_partitions i32, replication_factor i16, assignments[ index i32, broker_ids []i32 ],
        configs[ name s, value s? ] ], timeout_ms i32=60000, validate_only b
    < throttle_ms i32, topics[ name s, topic_id id @7+, error i16, message s?, topic_config_error_code#0 i16 @5+,
        num_partitions i32=-1 @5+, replication_factor i16=-1 @5+, configs[ name s, value s?, read_only b,
        config_source i8=-1, is_sensitive b ]? @5+ ]
20 DeleteTopics 1-6 flexible 4
    > topics[ name s?, topic_id id ] @6+, topic_names []s @1-5, timeout_ms i32
    < throttle_ms i32, responses[ name s?6+, topic_id id @6+, error i16, message s? @5+ ]
21 DeleteRecords 0-2 flexible 2
    > topics[ name s, partitions[ index i32, offset i64 ] ], timeout_ms i32
    < throttle_ms i32, topics[ name s, partitions[ index i32, low_watermark i64, error i16 ] ]
22 InitProducerId 0-5 flexible 2
    > transactional_id s?, transaction_timeout_ms i32, producer_id i64=-1 @3+, producer_epoch i16=-1 @3+
    < throttle_ms i32, error i16, producer_id i64=-1, producer_epoch i16
23 OffsetForLeaderEpoch 2-4 flexible 4
    > replica_id i32=-2 @3+, topics[ topic s, partitions[ partition i32, current_leader_epoch i32=-1, leader_epoch
        i32 ] ]
    < throttle_ms i32, topics[ topic s, partitions[ error i16, partition i32, leader_epoch i32=-1, end_offset i64=-1
        ] ]
24 AddPartitionsToTxn 0-3 flexible 3
    > transactional_id s, producer_id i64, producer_epoch i16, topics[ name s, partitions []i32 ]
    < throttle_ms i32, topics[ name s, partitions[ index i32, error i16 ] ]
25 AddOffsetsToTxn 0-4 flexible 3
    > transactional_id s, producer_id i64, producer_epoch i16, group_id s
    < throttle_ms i32, error i16
26 EndTxn 0-5 flexible 3
    > transactional_id s, producer_id i64, producer_epoch i16, committed b
    < throttle_ms i32, error i16, producer_id i64=-1 @5+, producer_epoch i16=-1 @5+
28 TxnOffsetCommit 0-5 flexible 3
    > transactional_id s, group_id s, producer_id i64, producer_epoch i16, generation_id i32=-1 @3+, member_id s
        @3+, instance_id s? @3+, topics[ name s, partitions[ index i32, offset i64, leader_epoch i32=-1 @2+,
        metadata s? ] ]
    < throttle_ms i32, topics[ name s, partitions[ index i32, error i16 ] ]
29 DescribeAcls 1-3 flexible 2
    > resource_type_filter i8, resource_name_filter s?, pattern_type_filter i8=3, principal_filter s?, host_filter
        s?, operation i8, permission_type i8
    < throttle_ms i32, error i16, message s?, resources[ resource_type i8, resource_name s, pattern_type i8=3, acls[
        principal s, host s, operation i8, permission_type i8 ] ]
32 DescribeConfigs 1-4 flexible 4
    > resources[ resource_type i8, resource_name s, configuration_keys []s? ], include_synonyms b,
        include_documentation b @3+
    < throttle_ms i32, results[ error i16, message s?, resource_type i8, resource_name s, configs[ name s, value s?,
        read_only b, config_source i8=-1, is_sensitive b, synonyms[ name s, value s?, source i8 ], config_type i8
        @3+, documentation s? @3+ ] ]
33 AlterConfigs 0-2 flexible 2
    > resources[ resource_type i8, resource_name s, configs[ name s, value s? ] ], validate_only b
    < throttle_ms i32, responses[ error i16, message s?, resource_type i8, resource_name s ]
35 DescribeLogDirs 1-5 flexible 2
    > topics[ topic s, partitions []i32 ]?
    < throttle_ms i32, error i16 @3+, results[ error i16, log_dir s, topics[ name s, partitions[ index i32,
        partition_size i64, offset_lag i64, is_future_key b ] ], total_bytes i64=-1 @4+, usable_bytes i64=-1 @4+,
        is_cordoned b @5+ ]
36 SaslAuthenticate 0-2 flexible 2
    > auth_bytes bytes
    < error i16, message s?, auth_bytes bytes, session_lifetime_ms i64 @1+
37 CreatePartitions 0-3 flexible 2
    > topics[ name s, count i32, assignments[ broker_ids []i32 ]? ], timeout_ms i32, validate_only b
    < throttle_ms i32, results[ name s, error i16, message s? ]
42 DeleteGroups 0-2 flexible 2
    > groups_names []s
    < throttle_ms i32, results[ group_id s, error i16 ]
43 ElectLeaders 0-2 flexible 2
    > election_type i8 @1+, topic_partitions[ topic s, partitions []i32 ]?, timeout_ms i32
    < throttle_ms i32, error i16 @1+, replica_election_results[ topic s, partition_result[ partition_id i32, error
        i16, message s? ] ]
44 IncrementalAlterConfigs 0-1 flexible 1
    > resources[ resource_type i8, resource_name s, configs[ name s, config_operation i8, value s? ] ],
        validate_only b
    < throttle_ms i32, responses[ error i16, message s?, resource_type i8, resource_name s ]
46 ListPartitionReassignments 0-0 flexible 0
    > timeout_ms i32, topics[ name s, indexes []i32 ]?
    < throttle_ms i32, error i16, message s?, topics[ name s, partitions[ index i32, replicas []i32, adding_replicas
        []i32, removing_replicas []i32 ] ]
47 OffsetDelete 0-0
    > group_id s, topics[ name s, partitions[ index i32 ] ]
    < error i16, throttle_ms i32, topics[ name s, partitions[ index i32, error i16 ] ]
48 DescribeClientQuotas 0-1 flexible 1
    > components[ entity_type s, match_type i8, match s? ], strict b
    < throttle_ms i32, error i16, message s?, entries[ entity[ entity_type s, entity_name s? ], values[ key s, value
        f64 ] ]?
49 AlterClientQuotas 0-1 flexible 1
    > entries[ entity[ entity_type s, entity_name s? ], ops[ key s, value f64, remove b ] ], validate_only b
    < throttle_ms i32, entries[ error i16, message s?, entity[ entity_type s, entity_name s? ] ]
50 DescribeUserScramCredentials 0-0 flexible 0
    > users[ name s ]?
    < throttle_ms i32, error i16, message s?, results[ user s, error i16, message s?, credential_infos[ mechanism
        i8, iterations i32 ] ]
51 AlterUserScramCredentials 0-0 flexible 0
    > deletions[ name s, mechanism i8 ], upsertions[ name s, mechanism i8, iterations i32, salt bytes,
        salted_password bytes ]
    < throttle_ms i32, results[ user s, error i16, message s? ]
60 DescribeCluster 0-2 flexible 0
    > want_cluster_operations b, endpoint_type i8=1 @1+, include_fenced_brokers b @2+
    < throttle_ms i32, error i16, message s?, endpoint_type i8=1 @1+, cluster_id s, controller_id i32=-1, brokers[
        broker_id i32, host s, port i32, rack s?, is_fenced b @2+ ], cluster_operations i32=-2147483648
61 DescribeProducers 0-0 flexible 0
    > topics[ name s, indexes []i32 ]
    < throttle_ms i32, topics[ name s, partitions[ index i32, error i16, message s?, active_producers[ producer_id
        i64, producer_epoch i32, last_sequence i32=-1, last_timestamp i64=-1, coordinator_epoch i32,
        current_txn_start_offset i64=-1 ] ] ]
65 DescribeTransactions 0-0 flexible 0
    > transactional_ids []s
    < throttle_ms i32, transaction_states[ error i16, transactional_id s, transaction_state s,
        transaction_timeout_ms i32, transaction_start_time_ms i64, producer_id i64, producer_epoch i16, topics[
        topic s, partitions []i32 ] ]
66 ListTransactions 0-2 flexible 0
    > state_filters []s, producer_id_filters []i64, duration_filter i64=-1 @1+, transactional_id_pattern s? @2+
    < throttle_ms i32, error i16, unknown_state_filters []s, transaction_states[ transactional_id s, producer_id
        i64, transaction_state s ]
68 ConsumerGroupHeartbeat 0-1 flexible 0
    > group_id s, member_id s, member_epoch i32, instance_id s?, rack_id s?, rebalance_timeout_ms i32=-1,
        subscribed_topic_names []s?, subscribed_topic_regex s? @1+, server_assignor s?, topic_partitions[ topic_id
        id, partitions []i32 ]?
    < throttle_ms i32, error i16, message s?, member_id s?, member_epoch i32, heartbeat_interval_ms i32, assignment{
        topic_partitions[ topic_id id, partitions []i32 ] }?
69 ConsumerGroupDescribe 0-1 flexible 0
    > group_ids []s, want_operations b
    < throttle_ms i32, groups[ error i16, message s?, group_id s, group_state s, group_epoch i32, assignment_epoch
        i32, assignor_name s, members[ member_id s, instance_id s?, rack_id s?, member_epoch i32, client_id s,
        client_host s, subscribed_topic_names []s, subscribed_topic_regex s?, assignment{ topic_partitions[ topic_id
        id, topic_name s, partitions []i32 ] }, target_assignment{ topic_partitions[ topic_id id, topic_name s,
        partitions []i32 ] }, member_type i8=-1 @1+ ], operations i32=-2147483648 ]
74 ListConfigResources 0-1 flexible 0
    > resource_types []i8 @1+
    < throttle_ms i32, error i16, config_resources[ resource_name s, resource_type i8=16 @1+ ]
75 DescribeTopicPartitions 0-0 flexible 0
    > topics[ name s ], response_partition_limit i32=2000, cursor{ topic_name s, index i32 }?
    < throttle_ms i32, topics[ error i16, name s?, topic_id id, is_internal b, partitions[ error i16, index i32,
        leader_id i32, leader_epoch i32=-1, replica_nodes []i32, isr_nodes []i32, eligible_leader_replicas []i32?,
        last_known_elr []i32?, offline_replicas []i32 ], operations i32=-2147483648 ], next_cursor{ topic_name s,
        index i32 }?
76 ShareGroupHeartbeat 1-1 flexible 0
    > group_id s, member_id s, member_epoch i32, rack_id s?, subscribed_topic_names []s?
    < throttle_ms i32, error i16, message s?, member_id s?, member_epoch i32, heartbeat_interval_ms i32, assignment{
        topic_partitions[ topic_id id, partitions []i32 ] }?
77 ShareGroupDescribe 1-1 flexible 0
    > group_ids []s, want_operations b
    < throttle_ms i32, groups[ error i16, message s?, group_id s, group_state s, group_epoch i32, assignment_epoch
        i32, assignor_name s, members[ member_id s, rack_id s?, member_epoch i32, client_id s, client_host s,
        subscribed_topic_names []s, assignment{ topic_partitions[ topic_id id, topic_name s, partitions []i32 ] } ],
        operations i32=-2147483648 ]
78 ShareFetch 1-2 flexible 0
    > group_id s?, member_id s?, session_epoch i32, max_wait_ms i32, min_bytes i32, max_bytes i32=2147483647,
        max_records i32, batch_size i32, acquire_mode i8 @2+, is_renew b @2+, topics[ topic_id id, partitions[ index
        i32, batches[ first_offset i64, last_offset i64, types []i8 ] ] ], forgotten[ topic_id id, partitions []i32 ]
    < throttle_ms i32, error i16, message s?, lock_timeout_ms i32, responses[ topic_id id, partitions[ index i32,
        error i16, message s?, acknowledge_error i16, acknowledge_message s?, current_leader{ leader_id i32,
        leader_epoch i32 }, records recs?, acquired_records[ first_offset i64, last_offset i64, delivery_count i16 ]
        ] ], node_endpoints[ node_id i32, host s, port i32, rack s? ]
79 ShareAcknowledge 1-2 flexible 0
    > group_id s?, member_id s?, session_epoch i32, is_renew b @2+, topics[ topic_id id, partitions[ index i32,
        batches[ first_offset i64, last_offset i64, types []i8 ] ] ]
    < throttle_ms i32, error i16, message s?, lock_timeout_ms i32 @2+, responses[ topic_id id, partitions[ index i32,
        error i16, message s?, current_leader{ leader_id i32, leader_epoch i32 } ] ], node_endpoints[ node_id i32,
        host s, port i32, rack s? ]
90 DescribeShareGroupOffsets 0-1 flexible 0
    > groups[ group_id s, topics[ topic_name s, partitions []i32 ]? ]
    < throttle_ms i32, groups[ group_id s, topics[ topic_name s, topic_id id, partitions[ index i32, start_offset
        i64, leader_epoch i32, lag i64=-1 @1+, error i16, message s? ] ], error i16, message s? ]
91 AlterShareGroupOffsets 0-0 flexible 0
    > group_id s, topics[ topic_name s, partitions[ index i32, start_offset i64 ] ]
    < throttle_ms i32, error i16, message s?, responses[ topic_name s, topic_id id, partitions[ index i32, error i16,
        message s? ] ]
92 DeleteShareGroupOffsets 0-0 flexible 0
    > group_id s, topics[ topic_name s ]
    < throttle_ms i32, error i16, message s?, responses[ topic_name s, topic_id id, error i16, message s? ]
"""
