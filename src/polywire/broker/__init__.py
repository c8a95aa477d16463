"""The broker: topics, groups, transactions, users and permissions, independent of protocols."""
